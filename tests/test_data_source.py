"""A run reads any data.Source: this one has no files and nothing but the protocol's members."""

import contextlib
import io
import math
import re

import torch
from conftest import last_checkpoint, rows

import checkpoint
import config
import data
import dist
import train
from start import Origin, describe_evaluation, open_start


class Counting:
    """A data.Source without files: sequence n counts from n, modulo 7."""

    vocab_size = 257
    tokenizer = None
    tokenizer_file = {}
    fingerprint = "counting"

    def open(self, split, seq_len, seed):
        return CountingSequences(seq_len)

    def decode(self, tokens):
        return "-".join(map(str, tokens))


class CountingSequences:
    bytes_per_token = math.nan

    def __init__(self, seq_len):
        self.seq_len = seq_len

    def __len__(self):
        return 1000

    def __getitem__(self, indices):
        return torch.stack([torch.arange(n, n + self.seq_len + 1) % 7 for n in indices])

    def describe(self, n):
        yield f"counting {n} times"

    def place_of(self, n):
        return f"from {n}"

    def raise_if_changed(self):
        pass


def train_on_a_source(argv: list[str]) -> tuple[int, str]:
    world = dist.start("cpu")
    source = Counting()
    machine = dist.find_machine(world)
    run = config.resolve(config.parse(argv), machine, data.facts_of(source))
    start = open_start(run, Origin(config.parse(argv)), source, world)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        state = train.build(run, start.mesh)
        print(*train.describe_start(state, run, start), sep="\n")
        status = train.train(state, run, start)
        print(describe_evaluation(run, start, 1.0))
    return status, out.getvalue()


def test_a_source_needs_only_what_its_protocol_says(on_ranks, tmp_path):
    text = f"--max_steps 30 --lr 1e-2 --sample_tokens 3 --seed 1 --out {tmp_path}/run"
    (status, said), _ = on_ranks(2, train_on_a_source, text)
    assert status == 0 and "data    counting 240 times" in said
    assert re.search(r"^0-1-2-3(-\d+){3}$", said, re.M)  # the sample
    assert "bits per byte not comparable" in said
    losses = [row["loss"] for row in rows(tmp_path / "run")]
    assert losses[-1] < losses[0] / 2
    manifest = checkpoint.read_manifest(last_checkpoint(tmp_path / "run"))
    assert (manifest["data"], manifest["tokenizer"]) == ("counting", None)
