"""--data DIR:SHARE,DIR:SHARE,...: the sequences of several folders, in these shares.

Sequence n of a mixture is a function of (seed, n), as that of one folder, so every mesh and a run
that continues read the same data. It costs nothing per step. To remove it, delete this file and
train.load_mixture.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from data import SHARE, DataError, TokenDataset, TokenFolder, open_folder


@dataclass(frozen=True)
class MixedFolders:
    """A data.Source: several folders with one tokenizer, and their shares in thousandths."""

    folders: list[TokenFolder]
    shares: list[int]

    @property
    def vocab_size(self) -> int:
        return self.folders[0].vocab_size

    @property
    def tokenizer(self) -> str | None:
        return self.folders[0].tokenizer

    @property
    def tokenizer_file(self) -> dict[str, bytes]:
        return self.folders[0].tokenizer_file

    @property
    def fingerprint(self) -> str:
        parts = zip(self.shares, self.folders)
        return ", ".join(f"{share}/1000 of {folder.fingerprint}" for share, folder in parts)

    def open(self, split: str, seq_len: int, seed: int | None) -> "Mixture":
        """Return the sequences of "train" or "val". Raises DataError."""
        return Mixture([folder.open(split, seq_len, seed) for folder in self.folders], self.shares)

    def decode(self, tokens: list[int]) -> str:
        return self.folders[0].decode(tokens)


def open_mixture(data: str) -> MixedFolders:
    """Open the folders of a mixture DIR:SHARE,DIR:SHARE,... Raises DataError."""
    paths, shares = zip(*parse_mixture(data))
    folders = [open_folder(path) for path in paths]
    first = folders[0]
    for folder in folders:
        if folder.vocabulary != first.vocabulary:
            raise DataError(
                f"--data {data}: {folder.path} and {first.path} have different tokenizers; "
                "prepare all folders of a mixture with the same tokenizer"
            )
    return MixedFolders(folders, list(shares))


def parse_mixture(data: str) -> list[tuple[Path, int]]:
    """Return the folders of DIR:SHARE,DIR:SHARE,... and their shares, rounded to thousandths.

    Raises DataError, also if the shares do not add up to 1.
    """
    parts = []
    for item in data.split(","):
        match = SHARE.fullmatch(item)
        if not match:
            raise DataError(
                f"--data {data} is not a folder; as a mixture DIR:SHARE,DIR:SHARE,... it lacks "
                f"the share of {item}"
            )
        share = round(1000 * float(match[2]))
        if share < 1:
            raise DataError(f"--data {data}: the share {match[2]} of {match[1]} is less than 0.001")
        parts.append((Path(match[1]), share))
    total = sum(share for _, share in parts)
    if total != 1000:
        raise DataError(
            f"--data {data}: the shares, rounded to thousandths, add up to {total / 1000:g}, not 1"
        )
    return parts


class Mixture:
    """The sequences of one split of several folders, like TokenDataset for one folder.

    With seeds, folders take turns in the same order in every thousand sequences, with separate
    epochs. Without seeds (validation), they follow one another, each stretched to its share. The
    evenly spread `val_indices` then read each folder from start to end, in proportion to its share.

    For example, folders A and B have the shares 0.7 and 0.3, and 60 and 25 sequences. With seeds,
    turn t of A is due at (t + 0.25) / 700 and turn t of B at (t + 0.75) / 300: the order is
    A A B A A B A A A B ... Without seeds, the length is 1000 * 60. The first 42,000 numbers are
    stretched over A (number 21,000 reads A's sequence 30), the other 18,000 over B.
    """

    def __init__(self, parts: list[TokenDataset], shares: list[int]):
        self.parts = parts
        self.shares = shares  # thousandths
        turns = []  # 1,000 tuples (when the turn is due, folder, number of the folder's turn)
        for i, share in enumerate(self.shares):
            stagger = (i + 0.5) / len(parts)  # or folders with equal shares would be due together
            turns += [((turn + stagger) / share, i, turn) for turn in range(share)]
        self.turns = sorted(turns)

    def __len__(self) -> int:
        return 1000 * max(map(len, self.parts))

    @property
    def bytes_per_token(self) -> float:
        parts = zip(self.shares, self.parts)
        return sum(share / 1000 * part.bytes_per_token for share, part in parts)

    def describe(self, n: int) -> Iterator[str]:
        for share, part in zip(self.shares, self.parts):
            for line in part.describe(n * share / 1000):
                yield f"{line} at a share of {share / 1000:g}"

    def place_of(self, n: int) -> str:
        i, number = self.source(n)
        return self.parts[i].place_of(number)

    def source(self, n: int) -> tuple[int, int]:
        """Return (index of the folder that sequence n comes from, its number in that folder)."""
        if self.parts[0].seed is not None:
            thousand, place = divmod(n, 1000)
            _, i, turn = self.turns[place]
            return i, thousand * self.shares[i] + turn
        for i, share in enumerate(self.shares):
            stretched = len(self) // 1000 * share
            if n < stretched:
                return i, n * len(self.parts[i]) // stretched
            n -= stretched
        raise IndexError("a sequence number past the end of the mixture")

    def __getitem__(self, indices: list[int]) -> Tensor:
        return torch.cat([self.parts[i][[number]] for i, number in map(self.source, indices)])
