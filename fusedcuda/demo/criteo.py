"""Rows of the Criteo display-advertising data set: a reader and a generator of the same format.

A row is a click label, 13 integer features I1 to I13 and 26 categorical features C1 to C26 (hashes
of 8 hexadecimal digits). Any feature may be missing. Two forms are read, each plain or gzip:

- Criteo's own: tab-separated, the 40 columns in that order, no header;
- with a header (usually comma-separated, `label,I1,...,C26`): columns in any order, quoted or not,
  further columns ignored, integers also as `260.0`, which is how pandas writes a column with gaps.

A file that is neither raises ValueError naming the file, the line, the column, what was expected
and what was found.
"""

from __future__ import annotations

import csv
import gzip
import re
import zlib
from array import array
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from io import BufferedIOBase
from itertools import chain, islice
from os import PathLike

import torch
from torch import Tensor, nn

INTEGER_COLUMNS = tuple(f"I{i}" for i in range(1, 14))
CATEGORY_COLUMNS = tuple(f"C{i}" for i in range(1, 27))
COLUMNS = ("label", *INTEGER_COLUMNS, *CATEGORY_COLUMNS)

# An empty cell. So negative that no integer of at most 18 digits can be mistaken for it.
MISSING = torch.iinfo(torch.int64).min

_LABEL = re.compile(r"[01](\.0*)?")
_INTEGER = re.compile(r"(-?[0-9]{1,18})(\.0*)?")
_CATEGORY = re.compile(r"[0-9a-fA-F]{8}")

_PROGRESS_EVERY = 10_000  # rows
_MAX_LINE_BYTES = 1 << 16  # a real row has about 250; more than this is not a text file
_UTF8_BOM = b"\xef\xbb\xbf"
_GZIP_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True)
class CriteoRows:
    """N rows as they stand in the file, on the CPU.

    labels:     int64 [N], 0 or 1
    integers:   int64 [N, 13], MISSING where the cell is empty
    categories: int64 [N, 26], 0 to 2**32 - 1, MISSING where the cell is empty
    """

    labels: Tensor
    integers: Tensor
    categories: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def dense(self, width: int = len(INTEGER_COLUMNS)) -> Tensor:
        """float32 [N, width]: log(1 + max(x, 0)), then columns of zeros up to `width`.

        A missing integer becomes 0, and so does a negative one (I2 contains a few).
        """
        logs = self.integers.clamp(min=0).double().log1p().float()
        return nn.functional.pad(logs, (0, width - logs.size(1)))

    def table_indices(self, table_rows: int) -> Tensor:
        """int64 [N, 26]: each id modulo `table_rows`; a missing category has id 0."""
        return self.categories.clamp(min=0) % table_rows


def read_rows(
    path: str | PathLike[str],
    limit: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> CriteoRows:
    """Reads the first `limit` >= 1 rows (default: all); what follows them is not looked at.

    `progress` is called with the number of rows read so far, every 10,000 rows.
    Raises OSError if the file cannot be opened, ValueError if it is not in Criteo's format.
    """
    values = array("q")
    count = 0
    with open(path, "rb") as file:
        is_gzip = file.read(2) == _GZIP_MAGIC
        file.seek(0)
        with gzip.GzipFile(fileobj=file) if is_gzip else nullcontext(file) as stream:
            for row in islice(_parse(str(path), stream), limit):
                values.extend(row)
                count += 1
                if progress is not None and count % _PROGRESS_EVERY == 0:
                    progress(count)
    table = torch.frombuffer(values, dtype=torch.int64).view(count, len(COLUMNS))
    labels, integers, categories = table.split([1, 13, 26], dim=1)
    return CriteoRows(labels.flatten(), integers.contiguous(), categories.contiguous())


def write_tsv(rows: CriteoRows, path: str | PathLike[str]) -> None:
    """Writes `rows` in Criteo's own form, compressed if the name ends in `.gz`."""
    opener = gzip.open if str(path).endswith(".gz") else open
    with opener(path, "wt", encoding="ascii", newline="\n") as file:
        for label, integers, categories in zip(
            rows.labels.tolist(), rows.integers.tolist(), rows.categories.tolist(), strict=True
        ):
            cells = [str(label)]
            cells += ["" if value == MISSING else str(value) for value in integers]
            cells += ["" if value == MISSING else f"{value:08x}" for value in categories]
            file.write("\t".join(cells) + "\n")


def _parse(path: str, stream: BufferedIOBase) -> Iterator[list[int]]:
    """Yields each row as 40 integers in the order of COLUMNS."""
    lines = _text_lines(path, stream)
    first = next(lines, None)
    if first is None:
        raise ValueError(f"{path}: the file is empty; expected Criteo rows")
    number, text = first
    delimiter = "\t" if "\t" in text else ","
    names = _split(path, number, text, delimiter)
    if not set(names).isdisjoint(COLUMNS):
        width, positions = len(names), _header_positions(path, number, names)
    elif delimiter == "\t":
        width, positions = len(COLUMNS), list(range(len(COLUMNS)))
        lines = chain([first], lines)
    else:
        raise ValueError(
            f"{path}, line {number}: expected {len(COLUMNS)} tab-separated columns, or a header "
            f"that names label, I1 to I13 and C1 to C26; found {_quote(text)}"
        )

    cells = [
        (position, column, *_CELL_KINDS[column[0]])
        for position, column in zip(positions, COLUMNS, strict=True)
    ]
    is_header_alone = True
    for number, text in lines:
        is_header_alone = False
        fields = _split(path, number, text, delimiter)
        if len(fields) != width:
            raise ValueError(
                f"{path}, line {number}: expected {width} columns, found {len(fields)}: "
                f"{_quote(text)}"
            )
        row = []
        for position, column, convert, expected in cells:
            value = convert(fields[position])
            if value is None:
                raise ValueError(
                    f"{path}, line {number}, column {column}: expected {expected}, "
                    f"found {_quote(fields[position])}"
                )
            row.append(value)
        yield row
    if is_header_alone:
        raise ValueError(f"{path}: expected rows after the header, found none")


def _text_lines(path: str, stream: BufferedIOBase) -> Iterator[tuple[int, str]]:
    """Yields (line number, text without its line ending); blank lines at the end are dropped."""
    number = 0
    blank = None
    while True:
        number += 1
        try:
            raw = stream.readline(_MAX_LINE_BYTES)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{path}, line {number}: damaged gzip data: {error}") from error
        if not raw:
            return
        if len(raw) == _MAX_LINE_BYTES:
            raise ValueError(
                f"{path}, line {number}: longer than {_MAX_LINE_BYTES} bytes; expected text"
            )
        if number == 1:
            raw = raw.removeprefix(_UTF8_BOM)
        try:
            text = raw.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path}, line {number}: expected UTF-8 text, found byte "
                f"0x{raw[error.start]:02x} at position {error.start + 1}"
            ) from error
        if not text:
            blank = blank or number
            continue
        if blank is not None:
            raise ValueError(f"{path}, line {blank}: expected a row, found a blank line")
        yield number, text


def _split(path: str, number: int, text: str, delimiter: str) -> list[str]:
    # A tab never occurs inside a cell, and Criteo's own form has no quotes: the fast way is right.
    if delimiter == "\t":
        return text.split("\t")
    try:
        return next(csv.reader([text], strict=True))
    except csv.Error as error:
        raise ValueError(f"{path}, line {number}: expected CSV, but {error}") from error


def _header_positions(path: str, number: int, names: list[str]) -> list[int]:
    missing = [column for column in COLUMNS if column not in names]
    if missing:
        raise ValueError(f"{path}, line {number}: the header lacks {', '.join(missing)}")
    repeated = [column for column in COLUMNS if names.count(column) > 1]
    if repeated:
        raise ValueError(f"{path}, line {number}: the header repeats {', '.join(repeated)}")
    return [names.index(column) for column in COLUMNS]


def _label(text: str) -> int | None:
    return int(text[0]) if _LABEL.fullmatch(text) else None


def _integer(text: str) -> int | None:
    if not text:
        return MISSING
    match = _INTEGER.fullmatch(text)
    return int(match[1]) if match else None


def _category(text: str) -> int | None:
    if not text:
        return MISSING
    return int(text, 16) if _CATEGORY.fullmatch(text) else None


# Keyed by the first letter of the column's name.
_CELL_KINDS: dict[str, tuple[Callable[[str], int | None], str]] = {
    "l": (_label, "0 or 1"),
    "I": (_integer, "an integer of at most 18 digits or nothing"),
    "C": (_category, "8 hexadecimal digits or nothing"),
}


def _quote(text: str, length: int = 40) -> str:
    return repr(text if len(text) <= length else text[:length] + "...")


# Share of empty cells per column, rounded from the real set.
_INTEGERS_MISSING = (0.45, 0, 0.2, 0.2, 0.03, 0.25, 0.05, 0, 0.05, 0.45, 0.05, 0.75, 0.2)
_CATEGORIES_MISSING = (0,) * 18 + (0.4, 0.4, 0.05, 0.75, 0, 0.05, 0.4, 0.4)
# Distinct values per categorical column: some small sets, some long tails.
_VOCABULARY = tuple(10 ** (1 + column % 4) for column in range(len(CATEGORY_COLUMNS)))


def generate_rows(count: int, seed: int = 0) -> CriteoRows:
    """`count` synthetic rows: the same seed gives the same rows on the same torch version.

    The integers are log-normal (I2 has a few negatives), the ids follow Zipf's law, cells are
    missing about as often as in the real set, and about a quarter of the labels are 1. The label
    depends on the integers and on the frequent ids, so a model has something to learn.
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    # What the label depends on is drawn first, so that it does not change with `count`.
    integer_weights = 0.2 * normal(len(INTEGER_COLUMNS))
    value_effects = [0.3 * normal(size) for size in _VOCABULARY]

    scale = torch.linspace(0.5, 3.0, len(INTEGER_COLUMNS), dtype=torch.float64)
    integers = (scale + 1.2 * normal(count, len(INTEGER_COLUMNS))).exp().long()
    integers[:, INTEGER_COLUMNS.index("I2")] -= 2
    logit = (integers.clamp(min=0).double().log1p() - scale) @ integer_weights - 1.3

    columns = []
    for column, (size, effects) in enumerate(zip(_VOCABULARY, value_effects, strict=True)):
        cumulative = torch.arange(1, size + 1, dtype=torch.float64).pow(-1.1).cumsum(0)
        rank = torch.searchsorted(cumulative / cumulative[-1], uniform(count)).clamp(max=size - 1)
        logit += effects[rank]
        # An odd multiplier permutes the 32-bit numbers, so different ranks keep different ids.
        columns.append(((rank + 1) * 2_654_435_761 + column * 97_531) % 2**32)
    categories = torch.stack(columns, dim=1)

    labels = (uniform(count) < logit.sigmoid()).long()
    integers[uniform(*integers.shape) < torch.tensor(_INTEGERS_MISSING)] = MISSING
    categories[uniform(*categories.shape) < torch.tensor(_CATEGORIES_MISSING)] = MISSING
    return CriteoRows(labels, integers, categories)
