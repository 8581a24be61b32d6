"""A run reads any data.Source: this one has no files and nothing but the protocol's members."""

import contextlib
import io
import json
import math
import re
import threading
import time

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


def train_on_a_source(argv: list[str], source: data.Source) -> tuple[int, str]:
    world = dist.start(config.parse(argv).device)
    machine = dist.read_machine(world)
    run = config.resolve(config.parse(argv), machine, data.facts_of(source))
    start = open_start(run, Origin(config.parse(argv)), source, world)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        state = train.build(run, start.mesh)
        print(*train.describe_start(run, start), sep="\n")
        status = train.train(state, run, start)
        print(describe_evaluation(run, start, 1.0))
    return status, out.getvalue()


def test_a_source_needs_only_what_its_protocol_says(on_ranks, tmp_path):
    text = f"--max_steps 30 --lr 1e-2 --sample_tokens 3 --seed 1 --out {tmp_path}/run"
    (status, said), _ = on_ranks(2, train_on_a_source, text, Counting())
    assert status == 0 and "data    counting 240 times" in said
    assert re.search(r"^0-1-2-3(-\d+){3}$", said, re.M)  # the sample
    assert "bits per byte not comparable" in said
    losses = [row["loss"] for row in rows(tmp_path / "run")]
    assert losses[-1] < losses[0] / 2
    manifest = checkpoint.read_manifest(last_checkpoint(tmp_path / "run"))
    assert (manifest["data"], manifest["tokenizer"]) == ("counting", None)


class Slow(Counting):
    """Reads one batch after another, in 0.25 s each, which is longer than a step."""

    def open(self, split, seq_len, seed):
        return SlowSequences(seq_len)


class SlowSequences(CountingSequences):
    lock = threading.Lock()

    def __getitem__(self, indices):
        with self.lock:
            time.sleep(0.25)
        return super().__getitem__(indices)


def test_waiting_for_data_is_logged_and_profiled(on_ranks, tmp_path):
    """Two micro-batches a step; four are read ahead."""
    text = "--strategy single --max_steps 5 --micro_batch_size 4 --profile 2:4"
    ((status, _),) = on_ranks(1, train_on_a_source, text, Slow())
    assert status == 0
    waits = [row["data_wait"] for row in rows(tmp_path / "run")]
    assert sum(waits[:4]) > 0.4  # step 5, in which operations are counted, takes longer
    figures = json.loads((tmp_path / "run/profile/rank_0.json").read_text())
    assert figures["data_wait"] * figures["step_time"] > 0.05
