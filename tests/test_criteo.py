"""The reader and the generator of Criteo rows."""

import csv
import gzip
import math
import re
from pathlib import Path

import pytest
import torch

from fusedcuda.demo.criteo import (
    CATEGORY_COLUMNS,
    COLUMNS,
    INTEGER_COLUMNS,
    MISSING,
    CriteoRows,
    generate_rows,
    read_rows,
    write_tsv,
)

# 200 real rows, which may not be redistributed with the project.
SAMPLE = Path(__file__).parents[2] / "shared" / "data" / "criteo_sample.csv"

# Two rows of cells in the order of COLUMNS, and what they mean.
ROW_A = ["1", "3", "-1", "", *map(str, range(10)), "05db9164", "", "FFFFFFFF", *["0000000a"] * 23]
ROW_B = ["0", *[""] * 13, *[""] * 26]
INTEGERS = [[3, -1, MISSING, *range(10)], [MISSING] * 13]
CATEGORIES = [[0x05DB9164, MISSING, 2**32 - 1, *[10] * 23], [MISSING] * 26]

TSV = "\t".join(ROW_A) + "\n" + "\t".join(ROW_B) + "\n"
CSV = "\n".join(",".join(cells) for cells in (COLUMNS, ROW_A, ROW_B)) + "\n"


@pytest.fixture
def write(tmp_path):
    def write_file(content: str | bytes, name: str = "rows.txt") -> str:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return write_file


def changed(column: str, cell: str) -> str:
    """The TSV form with one cell of the second row replaced."""
    cells = ROW_B.copy()
    cells[COLUMNS.index(column)] = cell
    return "\t".join(ROW_A) + "\n" + "\t".join(cells) + "\n"


def reordered_and_quoted() -> str:
    names = ["row_id", *reversed(COLUMNS)]
    rows = [["7", *reversed(cells)] for cells in (ROW_A, ROW_B)]
    return "\n".join(",".join(f'"{cell}"' for cell in cells) for cells in (names, *rows))


def as_pandas_writes_it() -> str:
    integers = [f"{cell}.0" if cell else "" for cell in ROW_A[1:14]]
    row = ["1.0", *integers, *ROW_A[14:]]
    return "\n".join(",".join(cells) for cells in (COLUMNS, row, ROW_B))


def same(a: CriteoRows, b: CriteoRows) -> bool:
    return (
        torch.equal(a.labels, b.labels)
        and torch.equal(a.integers, b.integers)
        and torch.equal(a.categories, b.categories)
    )


FORMS = {
    "tsv": TSV,
    "tsv gzip": gzip.compress(TSV.encode()),
    "tsv crlf": TSV.replace("\n", "\r\n"),
    "tsv bom": "\ufeff" + TSV,
    "tsv without final newline": TSV.rstrip("\n"),
    "tsv blank lines at the end": TSV + "\n\r\n\n",
    "tsv with header": "\t".join(COLUMNS) + "\n" + TSV,
    "csv": CSV,
    "csv gzip": gzip.compress(CSV.encode()),
    "csv crlf": CSV.replace("\n", "\r\n"),
    "csv bom": "\ufeff" + CSV,
    "csv reordered, quoted, one more column": reordered_and_quoted(),
    "csv from pandas": as_pandas_writes_it(),
}


@pytest.mark.parametrize("content", FORMS.values(), ids=FORMS.keys())
def test_every_form_reads_the_same(write, content):
    rows = read_rows(write(content))
    assert rows.labels.tolist() == [1, 0]
    assert rows.integers.tolist() == INTEGERS
    assert rows.categories.tolist() == CATEGORIES
    assert rows.integers.dtype == rows.categories.dtype == rows.labels.dtype == torch.int64


def test_features_of_present_negative_and_missing_cells(write):
    rows = read_rows(write(TSV))
    expected = [math.log(4), 0, 0, *(math.log(1 + i) for i in range(10)), 0, 0, 0]
    dense = rows.dense(width=16)
    torch.testing.assert_close(dense, torch.tensor([expected, [0.0] * 16]))
    assert rows.dense().shape == (2, len(INTEGER_COLUMNS))
    first = [0x05DB9164 % 1000, 0, (2**32 - 1) % 1000, *[10] * 23]
    assert rows.table_indices(1000).tolist() == [first, [0] * len(CATEGORY_COLUMNS)]


BAD_CELLS = [
    ("label", "2", "0 or 1"),
    ("label", "", "0 or 1"),
    ("label", "-1", "0 or 1"),
    ("I1", "abc", "an integer"),
    ("I2", "1.5", "an integer"),
    ("I3", "nan", "an integer"),
    ("I4", "1_000", "an integer"),
    ("I5", " 7", "an integer"),
    ("I6", "9" * 19, "at most 18 digits"),
    ("I13", "05db9164", "an integer"),
    ("C1", "05db916", "8 hexadecimal digits"),
    ("C2", "05db91645", "8 hexadecimal digits"),
    ("C3", "0xdb9164", "8 hexadecimal digits"),
    ("C25", "05db_164", "8 hexadecimal digits"),
    ("C26", "zzzzzzzz", "8 hexadecimal digits"),
]


@pytest.mark.parametrize(("column", "cell", "expected"), BAD_CELLS)
def test_bad_cell(write, column, cell, expected):
    path = write(changed(column, cell))
    with pytest.raises(ValueError, match=expected) as error:
        read_rows(path)
    assert str(error.value).startswith(f"{path}, line 2, column {column}: expected ")
    assert str(error.value).endswith(f"found {cell!r}")


def csv_without(*columns: str) -> str:
    return "\n".join(",".join(column for column in COLUMNS if column not in columns) for _ in "ab")


BAD_FILES = {
    "empty": ("", ": the file is empty"),
    "blank lines only": ("\n\n", ": the file is empty"),
    "header only": (CSV.partition("\n")[0] + "\n\n", ": expected rows after the header"),
    "too few columns": (TSV + "1\t2\n", ", line 3: expected 40 columns, found 2: '1\\t2'"),
    "too many columns": (TSV + "\t" * 40, ", line 3: expected 40 columns, found 41"),
    "csv row too short": (CSV + "1,2", ", line 4: expected 40 columns, found 2"),
    "columns missing": (csv_without("I3", "C26"), ", line 1: the header lacks I3, C26"),
    "column twice": (f"C1,{CSV}", ", line 1: the header repeats C1"),
    "csv without header": (
        CSV.partition("\n")[2],
        ", line 1: expected 40 tab-separated columns, or a header",
    ),
    "open quote": (CSV + '"1,2', ", line 4: expected CSV, but unexpected end of data"),
    "blank line between rows": (TSV.replace("\n", "\n\n", 1), ", line 2: expected a row"),
    "not UTF-8": (TSV.encode() + b"1\t\xff", ", line 3: expected UTF-8 text, found byte 0xff"),
    "UTF-16": (TSV.encode("utf-16"), ", line 1: expected UTF-8 text, found byte 0x"),
    "zeros": (b"\0" * 500, ", line 1: expected 40 tab-separated columns, or a header"),
    "no line ends": (b"x" * 200_000, ", line 1: longer than 65536 bytes"),
    "truncated gzip": (gzip.compress(TSV.encode())[:-12], "damaged gzip data"),
    "corrupt gzip": (
        gzip.compress(TSV.encode())[:30] + b"\xff" * 200,
        "damaged gzip data",
    ),
    "gzip magic only": (b"\x1f\x8b", "damaged gzip data"),
}


@pytest.mark.parametrize(("content", "message"), BAD_FILES.values(), ids=BAD_FILES.keys())
def test_bad_file(write, content, message):
    path = write(content)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        read_rows(path)
    assert str(error.value).startswith(path)


def test_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_rows(tmp_path / "nowhere.tsv")


def test_limit_does_not_look_further(write):
    path = write(TSV + "neither a row nor the end\n")
    assert len(read_rows(path, limit=2)) == 2
    with pytest.raises(ValueError, match="line 3"):
        read_rows(path, limit=3)


def test_limit_beyond_the_end_reads_all(write):
    assert len(read_rows(write(TSV), limit=100)) == 2


def test_progress_counts_rows(tmp_path):
    path = tmp_path / "rows.tsv"
    write_tsv(generate_rows(20_001), path)
    counts = []
    read_rows(path, progress=counts.append)
    assert counts == [10_000, 20_000]


@pytest.mark.parametrize("name", ["rows.tsv", "rows.tsv.gz"])
def test_written_rows_read_back_identically(tmp_path, name):
    rows = generate_rows(500, seed=3)
    path = tmp_path / name
    write_tsv(rows, path)
    assert (path.read_bytes()[:2] == b"\x1f\x8b") == name.endswith(".gz")
    assert same(read_rows(path), rows)


def test_seed_decides_the_rows():
    assert same(generate_rows(200, seed=1), generate_rows(200, seed=1))
    assert not same(generate_rows(200, seed=1), generate_rows(200, seed=2))


def test_generated_rows_look_like_criteo():
    rows = generate_rows(20_000, seed=0)
    assert set(rows.labels.tolist()) == {0, 1}
    assert 0.15 < rows.labels.double().mean() < 0.35
    missing = (rows.integers == MISSING).double().mean(0)
    assert missing[0] == pytest.approx(0.45, abs=0.02)
    assert missing[1] == 0
    present = rows.integers[rows.integers != MISSING]
    assert -3 < present.min() < 0
    assert present.max() > 100
    ids = rows.categories[:, 2]  # a long tail: the commonest id is frequent, most are rare
    _, counts = ids[ids != MISSING].unique(return_counts=True)
    assert counts.max() > 0.1 * len(rows)
    assert counts.median() < 0.01 * len(rows)


def test_labels_can_be_learned():
    rows = generate_rows(20_000, seed=0)
    features, labels = rows.dense(), rows.labels.float()
    weights = torch.zeros(len(INTEGER_COLUMNS), requires_grad=True)
    bias = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights, bias], max_iter=50)

    def loss(part: slice) -> torch.Tensor:
        logits = features[part] @ weights + bias
        return torch.nn.functional.binary_cross_entropy_with_logits(logits, labels[part])

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(slice(10_000))
        value.backward()
        return value

    optimizer.step(closure)
    rate = labels.mean().item()
    entropy = -rate * math.log(rate) - (1 - rate) * math.log(1 - rate)
    assert loss(slice(10_000, None)).item() < entropy - 0.01


@pytest.mark.skipif(not SAMPLE.exists(), reason=f"no sample of the real rows at {SAMPLE}")
def test_real_sample():
    rows = read_rows(SAMPLE)
    with open(SAMPLE, newline="") as file:
        expected = list(csv.DictReader(file))
    assert len(rows) == len(expected) == 200
    for index in (0, 1, 199):
        for column, value in zip(INTEGER_COLUMNS, rows.integers[index].tolist(), strict=True):
            cell = expected[index][column]
            assert value == (float(cell) if cell else MISSING)
        for column, value in zip(CATEGORY_COLUMNS, rows.categories[index].tolist(), strict=True):
            cell = expected[index][column]
            assert ("" if value == MISSING else f"{value:08x}") == cell
