"""Numbers as people read them."""


def bytes_text(count: float) -> str:
    """A number of bytes with three digits and a decimal unit.

    >>> bytes_text(0), bytes_text(999), bytes_text(36_864), bytes_text(2**30)
    ('0 B', '999 B', '36.9 kB', '1.07 GB')
    """
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 999.5:
            return f"{size:.0f} B" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def seconds_text(seconds: float) -> str:
    """A time in the unit that suits it.

    >>> seconds_text(0.0042), seconds_text(12.34), seconds_text(75), seconds_text(7322)
    ('0.004 s', '12.3 s', '1 min 15 s', '2 h 2 min')
    """
    if seconds < 1:
        return f"{seconds:.2g} s" if seconds >= 0.01 else f"{seconds:.3f} s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def score_text(score: float | None) -> str:
    """A score with three decimals, and a dash where there is none.

    >>> score_text(0.8125), score_text(-0.05), score_text(None)
    ('0.812', '-0.050', '-')
    """
    return "-" if score is None else f"{score:.3f}"


def signed_text(score: float | None) -> str:
    """A difference of scores with its sign, and a dash where there is none.

    >>> signed_text(0.1), signed_text(None)
    ('+0.100', '-')
    """
    return "-" if score is None else f"{score:+.3f}"
