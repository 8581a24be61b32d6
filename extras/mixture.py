"""--data DIR:SHARE,DIR:SHARE,...: the sequences of several folders, in these shares.

Sequence n of a mixture is a function of (seed, n), as that of one folder, so every mesh and a run
that continues read the same data. It costs nothing per step. To remove it, delete this file and
train.load_mixture.
"""

import dataclasses
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from data import SHARE, DataError, TokenDataset, TokenFolder, open_folder


def open_folders(data: str) -> list[TokenFolder]:
    """Open the folders of a mixture DIR:SHARE,DIR:SHARE,... Raises DataError."""
    folders = []
    for path, share in parse_mixture(data):
        folder = open_folder(path)
        mark = f"{share}/1000 of {folder.fingerprint}"
        folders.append(dataclasses.replace(folder, share=share, fingerprint=mark))
        if folder.vocabulary != folders[0].vocabulary:
            raise DataError(
                f"--data {data}: {folder.path} and {folders[0].path} have different tokenizers; "
                "prepare all folders of a mixture with the same tokenizer"
            )
    return folders


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


class Mixture(Dataset):
    """The sequences of one split of several folders, like TokenDataset for one folder.

    With seeds, folders take turns in the same order in every thousand sequences, with separate
    epochs. Without seeds (validation), they follow one another, each stretched to its share. The
    evenly spread `val_indices` then read each folder from start to end, in proportion to its share.

    For example, folders A and B have the shares 0.7 and 0.3, and 60 and 25 sequences. With seeds,
    turn t of A is due at (t + 0.25) / 700 and turn t of B at (t + 0.75) / 300: the order is
    A A B A A B A A A B ... Without seeds, the length is 1000 * 60. The first 42,000 numbers are
    stretched over A (number 21,000 reads A's sequence 30), the other 18,000 over B.
    """

    def __init__(self, parts: list[TokenDataset]):
        self.parts = parts
        self.shares = [part.folder.share for part in parts]  # thousandths
        turns = []  # 1,000 tuples (when the turn is due, folder, number of the folder's turn)
        for i, share in enumerate(self.shares):
            stagger = (i + 0.5) / len(parts)  # or folders with equal shares would be due together
            turns += [((turn + stagger) / share, i, turn) for turn in range(share)]
        self.turns = sorted(turns)

    def __len__(self) -> int:
        return 1000 * max(map(len, self.parts))

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
