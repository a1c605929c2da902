"""How long does a large file of a user's take to be read as a task, and how much memory?

Files of `--megabytes` are written into `--folder`, with a text, a column that the task does not use, as long as the
text, and a label. Each is read in a process of its own, whole and with rows=10000: to columns, by
`data.tables.read_rows`, and to clean splits, by `data.user_files.parse_tasks`.

    python benchmarks/own_file.py
    python benchmarks/own_file.py --megabytes 5000 --kinds .csv --folder /tmp
"""

import argparse
import gzip
import json
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import IO, Any

import numpy as np

WORDS = np.array([f"word{number}" for number in range(5000)])
KINDS = (".csv", ".csv.gz", ".jsonl", ".parquet")
Row = tuple[str, str, str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000, help="size of the csv file")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where the files are written")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="endings of the files that are read")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for path in write_files(Path(folder), args.megabytes * 10**6, args.kinds):
            for options in ("", ",rows=10000"):
                for to_splits in (False, True):
                    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
                        print(fresh.submit(read, path, options, to_splits).result(), flush=True)


def rows() -> Iterator[Row]:
    draw = np.random.default_rng(0)
    while True:
        for words in draw.choice(WORDS, (1000, 100)):
            text = " ".join(words)
            yield text, text[::-1], "no" if words[0] < words[1] else "yes"


def write_files(folder: Path, size: int, kinds: Sequence[str]) -> Iterator[Path]:
    """A csv file, the same packed, as JSON lines and as parquet; each but the first goes when the next is asked for."""
    pa, pq = import_module("pyarrow"), import_module("pyarrow.parquet")
    names = ("text", "unused", "label")
    num_rows = size // sum(len(value) + 1 for value in next(rows()))
    for ending in (kind for kind in KINDS if kind in kinds or (kind == ".csv" and ".csv.gz" in kinds)):
        path = folder / f"own{ending}"
        if ending == ".parquet":
            source = rows()
            with pq.ParquetWriter(path, pa.schema([(name, pa.string()) for name in names])) as file:
                for start in range(0, num_rows, 10_000):
                    columns = zip(*islice(source, min(10_000, num_rows - start)))
                    file.write_table(pa.table(dict(zip(names, map(list, columns)))))
        elif ending == ".csv.gz":
            with (folder / "own.csv").open("rb") as plain, gzip.open(path, "wb", compresslevel=1) as packed:
                shutil.copyfileobj(plain, packed)
        else:
            with path.open("w") as text_file:
                write_text(text_file, num_rows, names if ending == ".jsonl" else ())
        yield path
        if ending != ".csv":
            path.unlink()


def write_text(file: IO[str], num_rows: int, names: tuple[str, ...]) -> None:
    file.write("" if names else "text,unused,label\n")
    for row in islice(rows(), num_rows):
        file.write(json.dumps(dict(zip(names, row))) + "\n" if names else ",".join(row) + "\n")


def read(path: Path, options: str, to_splits: bool) -> str:
    from atlas_fl.data.tables import read_rows
    from atlas_fl.data.user_files import parse_tasks

    before, start = peak_megabytes(), time.perf_counter()
    if to_splits:
        parse_tasks(f"own={path}{options}")
    else:
        read_rows([path], reading(options))
    took = time.perf_counter() - start
    kind = f"{path.name}{options} ({path.stat().st_size / 1e6:,.0f} MB) to {'splits' if to_splits else 'columns'}"
    return f"{kind}: {took:.1f} s, {peak_megabytes() - before:,.0f} MB above the {before:,.0f} MB of the program"


def reading(options: str) -> Any:
    from atlas_fl.data.formats import Reading

    most = options.partition("rows=")[2]
    return Reading(columns=(("text", "text"), ("label", "class")), rows=int(most) if most else None)


def peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


if __name__ == "__main__":
    main()
