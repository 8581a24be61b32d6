"""The memory of a rank: the estimate, the real tensors, and the reuse of freed memory."""

import contextlib
import dataclasses
import itertools
import platform
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from conftest import (
    FACTS,
    QUIET,
    ROOT,
    TINY,
    build_model,
    build_run,
    listen,
    resolve,
    rows,
    train_step,
)

import config
import dist
import optim
import train
from dist import blocks_per_unit, keep_freed_memory, read_machine
from estimate import flops_per_token, memory_of, state_bytes


def test_the_printed_estimate_counts_the_runs_parameters(on_ranks):
    """It uses the vocabulary of 257 and the sizes of the flags, not those of the named size."""
    text = "--max_steps 1 --model gpt2-124m --d_model 512 --d_ff 2048"
    ((status, said, _), _) = on_ranks(2, listen, text)
    assert status == 0 and "mesh    ddp: dp_replicate 2 x dp_shard 1" in said
    parameters = 320 * 512 + 512 + 2 * (2 * 512 + 3 * 512 * 512 + 3 * 512 * 2048)
    (line,) = [line for line in said.splitlines() if line.startswith("memory  estimate ")]
    *parts, total = map(float, re.findall(r"\d+\.\d+", line))
    assert parts[0] == round(4 * parameters / 1e6, 1)
    assert total == pytest.approx(sum(parts), abs=0.3)


def both_states(argv: list[str]) -> tuple[dict[str, int], dict[str, int]]:
    """The estimate of a rank, and the bytes of its real tensors after two steps."""
    run = build_run(argv)
    taken = {}
    optimizer = run.state.optimizer
    update = optimizer.step

    def step(*arguments):
        gradients = [weight.grad for weight in run.state.decoder.parameters()]
        taken["gradients"] = sum(4 * optim.local(gradient).numel() for gradient in gradients)
        return update(*arguments)

    optimizer.step = step
    for number in (1, 2):
        train_step(run, number)
    weights = run.state.tensors["model"].values()
    slots = itertools.chain(*(slots.values() for slots in optimizer.slots.values()))
    taken["weights"] = sum(4 * optim.local(weight).numel() for weight in weights)
    taken["optimizer"] = sum(optim.local(slot).nbytes for slot in slots)
    rules = config.update_rules(run.run)
    return state_bytes(run.run, rules), taken


@pytest.mark.parametrize(
    "ranks, strategy",
    [
        (2, "ddp"),
        (2, "fsdp --micro_batch_size 4"),  # without accumulation
        (4, "hsdp --dp_shard 2 --grad_sync shard --optimizer muon"),
        (4, "fsdp --tp 2 --grad_sync micro_batch --model tinyllama-1.1b --optimizer muon"),
    ],
)
def test_the_estimate_of_a_ranks_tensors_is_exact(on_ranks, ranks, strategy):
    text = f"--max_steps 2 --micro_batch_size 1 --strategy {strategy}"
    for estimate, taken in on_ranks(ranks, both_states, text):
        for part, size in taken.items():
            assert estimate[part] == size, part


@pytest.mark.parametrize(
    "text, ranks, are_gathered",
    [
        ("single --tp 2", 2, False),
        ("ddp", 2, False),
        ("ddp --tp 2", 4, True),  # which is FSDP with one shard per replica
        ("fsdp", 2, True),
        ("hsdp --dp_shard 2 --tp 2", 8, True),
    ],
)
def test_only_fsdp_gathers_weights(text, ranks, are_gathered):
    run = resolve(f"{TINY} --strategy {text} --global_batch_size 8", world_size=ranks)
    assert (memory_of(run)["gathered"] > 0) == are_gathered


def test_gradients_that_need_more_than_the_activations_take_their_place():
    run = resolve(f"{TINY} --strategy single --global_batch_size 1 --seq_len 8 --d_ff 4096")
    assert memory_of(run)["gradients"] > 0 == memory_of(run)["activations"]
    run = resolve(f"{TINY} --strategy single --global_batch_size 8")
    assert memory_of(run)["activations"] > 0 == memory_of(run)["gradients"]


def test_the_estimate_is_that_of_the_largest_shard():
    sizes = "--n_layer 1 --d_model 8 --d_ff 9 --dtype bfloat16 --global_batch_size 12"
    first = parts(f"{sizes} --strategy fsdp", vocab_size=10, world_size=3, device_type="cuda")
    # The first shard: 4 of 10 rows, 3 of 8, 3 of 9, in embedding, attention, MLP and norms
    numel = 4 * 8 + (3 * 8 + 2 * 2 * 8 + 3 * 8) + (3 * 8 + 3 * 8 + 3 * 9) + 3 * 3
    assert first["weights"] == 4 * numel


def gradient_storages(argv: list[str]) -> tuple[dict[str, int], list[set[tuple[int, int]]]]:
    """The estimate of a rank, and its gradients' storages before each backward of three steps.

    A storage is (address, bytes).
    """
    run = build_run(argv)
    found = []

    def look(*_):
        gradients = [weight.grad for weight in run.state.decoder.parameters()]
        storages = [grad.untyped_storage() for grad in gradients if grad is not None]
        found.append({(storage.data_ptr(), storage.nbytes()) for storage in storages})

    run.state.model.register_forward_hook(look)
    for step in (1, 2, 3):
        train_step(run, step)
    return memory_of(run.run), found


def test_ddp_accumulates_gradients_only_in_its_bucket(on_ranks):
    """They are there before its first all_reduce. In the second step DDP uses its final bucket."""
    for estimate, found in on_ranks(2, gradient_storages, "--strategy ddp --micro_batch_size 1"):
        first_step, later_steps = found[:4], found[4:]
        for storages in (first_step, later_steps):
            assert all(storage == storages[0] for storage in storages)
            ((_, size),) = storages[0]  # one for 20 gradients
            assert size == estimate["gradients"]


def parts(text: str, vocab_size: int, **machine) -> dict[str, int]:
    """The estimate of a small decoder for two sequences."""
    run = resolve(f"{TINY} --micro_batch_size 2 {text}", **machine)
    decoder = dataclasses.replace(run.model_config, vocab_size=vocab_size)
    run = dataclasses.replace(run, model_config=decoder)
    return memory_of(run)


@contextlib.contextmanager
def kept_for_backward(net: torch.nn.Module) -> Iterator[dict[int, int]]:
    """The storages that autograd keeps, {address: bytes}, without those of parameters."""
    weights = {optim.local(weight).untyped_storage().data_ptr() for weight in net.parameters()}
    kept = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = optim.local(tensor).untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield kept


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "shape, batch",
    [
        ("--seq_len 128", 2),  # scores are written out
        ("--seq_len 600 --n_kv_head 1", 1),  # torch's kernel
        ("--seq_len 128 --activation_checkpointing full", 3),
    ],
)
def test_the_estimate_of_activations_is_exact(dtype, shape, batch):
    """That is, of what two further blocks keep, with weights in float32, which they cast."""
    text = f"{TINY} {shape} --dtype {dtype} --strategy single --n_layer 3"
    run = resolve(f"{text} --global_batch_size {batch} --micro_batch_size {batch}")
    kept_by = []
    for n_layer in (1, 3):
        decoder = dataclasses.replace(run.model_config, n_layer=n_layer)
        net = build_model(decoder, dtype=run.compute_dtype)
        if run.activation_checkpointing != "none":
            dist.checkpoint_activations(net.blocks, run.activation_checkpointing, decoder)
        tokens = torch.zeros(batch, run.seq_len, dtype=torch.long)
        with kept_for_backward(net) as kept:
            loss = net(tokens, tokens)  # noqa: F841 (it holds the graph)
        kept_by.append(sum(kept.values()))
    assert memory_of(run)["activations"] == (kept_by[1] - kept_by[0]) * 3 / 2 > 0


GATE = "return self.down(self.activation(self.gate(x)) * self.up(x))"


@pytest.mark.slow(proves="a fork's estimate, without a change of estimate.py")
@pytest.mark.parametrize(
    "changed, flops, bytes, line",
    [
        # For each token, 6 FLOPs for every weight of gate, and in float32 gate(x) and the product
        ("return self.down(F.silu(self.up(x)))", 2 * 6 * 32 * 64, 2 * 4 * 2 * 64, ""),
        (f"x.sum().item()\n        {GATE}", None, None, "and activations, which are unknown"),
    ],
)
def test_a_changed_model_needs_no_other_edit(tmp_path, tokens, changed, flops, bytes, line):
    for path in ROOT.glob("*.py"):
        shutil.copy(path, tmp_path)
    source = (tmp_path / "model.py").read_text()
    assert source.count(GATE) == 1
    source = source.replace(GATE, changed)
    if "self.gate" not in changed:
        source = source.replace(
            "        self.gate = Linear(config.d_model, config.d_ff, bias=False)\n", ""
        )
    (tmp_path / "model.py").write_text(source)
    text = f"{TINY} {QUIET} --strategy single --dtype float32 --max_steps 2 --peak_tflops 1"
    command = [sys.executable, "train.py", *text.split(), "--data", tokens, "--out", "changed"]
    job = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert line in job.stdout
    row = rows(tmp_path / "changed")[-1]
    run = resolve(f"{text} --data {tokens}")
    if flops is None:
        assert row["mfu"] is None
        return
    (said,) = re.findall(r"activations (\S+)", job.stdout)
    before = memory_of(run)["activations"]
    per_token = row["mfu"] * 1e12 / row["tokens_per_second"]
    assert per_token == pytest.approx(flops_per_token(run.model_config) - flops)
    assert said == f"{(before - 8 * 16 * bytes) / 1e6:.1f}"


def chosen_strategies(argv: list[str], used: list[float]) -> list[str]:
    """What --strategy auto chooses if ddp would use these shares of a rank's memory."""
    world = dist.start("cpu")
    text = " ".join(argv)
    one = resolve(f"{text} --strategy ddp", world_size=world.size)
    ddp = sum(memory_of(one).values())
    found = []
    for share in used:
        sizes = {"SC_PHYS_PAGES": int(world.local_size * ddp / share), "SC_PAGE_SIZE": 1}
        with mock.patch("os.sysconf", sizes.__getitem__):
            here = vars(read_machine(world))
        found.append(resolve(text, **here).strategy)
    return found


def test_auto_chooses_ddp_up_to_80_percent_of_host_memory(on_ranks):
    text = "--loss_chunks 1 --dtype float32 --micro_batch_size 4"
    for found in on_ranks(2, chosen_strategies, text, [0.79, 0.81]):
        assert found == ["ddp", "fsdp"]


def page_faults_of_a_large_tensor() -> int:
    dist.start("cpu")
    keep_freed_memory()
    faults = []
    for _ in range(30):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(2**24)  # 64 MB: 16,384 pages
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return min(faults)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has mallopt")
def test_freed_memory_is_reused_without_page_faults(pool):
    (faults,) = pool(1, page_faults_of_a_large_tensor)
    assert faults < 100


@pytest.mark.parametrize(
    "wrap, size, blocks",
    [
        ("block", "tiny", 1),
        ("block_group:3", "tiny", 3),
        ("none", "llama3-8b", None),
        ("auto", "tiny", None),  # 3.4 MB of float32 weights: one unit
        # 4 x 256 x 256 + 3 x 256 x 512 weights and 2 norms: 2.6 MB a block, 21 MB in all
        ("auto", "tiny --n_layer 8 --d_model 256 --n_kv_head 4 --d_ff 512", 3),
        ("auto", "llama3-8b", 1),  # 872 MB a block
    ],
)
def test_wrap_gives_the_number_of_blocks_per_unit(wrap, size, blocks):
    run = resolve(f"--model {size} --wrap {wrap}")
    assert blocks_per_unit(run.wrap) == blocks


@pytest.mark.parametrize(
    "gigabytes, text, chunks",
    [
        # (4 + 4 + 2) * 8192 * 128256 bytes of logits are 10.5 GB.
        (106, "", 1),
        (104, "", 2),
        (24, "", 8),
        (24, "--dtype float32", 4),
        (24, "--tp 4", 2),
        (24, "--micro_batch_size 2", 16),
        (24, "--loss_chunks 3", 3),
    ],
)
def test_logits_use_at_most_a_tenth_of_device_memory(gigabytes, text, chunks):
    base = "--model llama3-8b --dtype bfloat16 --strategy single --global_batch_size 4"
    base += " --micro_batch_size 1"
    facts = dataclasses.replace(FACTS, vocab_size=128256)
    ranks = 4 if "--tp" in text else 1
    run = resolve(f"{base} {text}", facts=facts, world_size=ranks, device_memory=gigabytes * 10**9)
    assert run.loss_chunks == chunks
    if "--loss_chunks" not in text:
        without = resolve(
            f"{base} {text}",
            facts=facts,
            deleted=["chunked_loss"],
            world_size=ranks,
            device_memory=gigabytes * 10**9,
        )
        assert without.loss_chunks == 1


@pytest.mark.parametrize(
    "gigabytes, text, chosen",
    [
        (300, "", "--micro_batch_size 2"),
        (120, "", "--micro_batch_size 1 --grad_sync micro_batch"),
        (120, "--grad_sync micro_batch", "--micro_batch_size 1"),
        (120, "--n_layer 4", "--loss_chunks 8"),
        (60, "--n_layer 4", "--micro_batch_size 4 --grad_sync micro_batch --loss_chunks 8"),
    ],
)
def test_a_start_says_what_it_chose_to_fit_into_memory(gigabytes, text, chosen):
    base = "--model llama3-8b --dtype bfloat16 --strategy fsdp --global_batch_size 64"
    facts = dataclasses.replace(FACTS, vocab_size=128256)

    def said(text: str) -> list[str]:
        memory = gigabytes * 10**9
        run = resolve(f"{base} {text}", facts=facts, world_size=8, device_memory=memory)
        return list(train.describe_defaults(run))

    assert said(text) == [f"{chosen}: chosen to fit into 80% of {gigabytes},000 MB"]
    assert said(f"{text} {chosen}") == []
