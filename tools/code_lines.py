"""Count the code lines of `src`: lines with a token that is no comment and no docstring.

python -m tools.code_lines        a line with the count, the cap and the difference; exit code 1 above the cap
"""

import ast
import io
import tokenize
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "src"
CAP = 36_000
"""Most code lines of the whole. It is not raised to make room; the issues that follow may add 4,000 together."""


def code_lines(source: str) -> int:
    """The number of lines of this module that hold code."""
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    texts = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in skipped
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(lines - texts)


def main() -> None:
    """Print the count; raise SystemExit where it is above the cap."""
    count = sum(code_lines(path.read_text(encoding="utf-8")) for path in sorted(SOURCES.rglob("*.py")))
    print(f"src: {count:,} code lines; cap {CAP:,} ({CAP - count:+,})")
    if count > CAP:
        raise SystemExit("src is above its cap: delete what the change replaces")


if __name__ == "__main__":
    main()
