"""What train.py does with a GPU, in complete runs on the fake GPUs of fake_cuda.py.

During the steps only batches and log rows go between host and device, the host waits for neither,
and nothing reads values on the host. NCCL and the kernels with strict requirements would accept
their operands. The groups are those of make_mesh.
"""

import contextlib
import dataclasses
import io
import os
import shutil
import sys
from collections import Counter
from unittest import mock

import fake_cuda
import pytest
import torch
from conftest import flags
from core.conftest import Pool
from core.test_mesh import order_of_forward
from test_dist import place_on_mesh

import dist
import train
from model import SIZES, ModelConfig, Sampling, Transformer, generate

# (strategy and more, ranks, micro-batches of a rank in a step)
CASES = [
    ("single --dtype float32 --n_kv_head 4", 1, 2),
    ("single --optimizer muon --clip adaptive --optim_metrics_interval 2", 1, 1),
    ("single --checkpoint sharded --async_save --model tinyllama-1.1b --sample_tokens 2", 1, 1),
    ("single --tp 2 --model tinyllama-1.1b --activation_checkpointing selective", 2, 1),
    ("ddp --grad_sync micro_batch --clip adaptive --optimizer muon", 2, 2),
    ("fsdp --reshard_after_forward false --loss_chunks 2 --clip adaptive", 2, 2),
    ("fsdp --tp 2 --optimizer muon --checkpoint sharded --async_save --profile 0:1", 4, 1),
    ("hsdp --dp_shard 2 --grad_sync shard --checkpoint sharded", 4, 2),
]
BLOCKS = "to cuda, pageable, blocking"
READS = "to cpu, pageable, blocking"
ASKS = "asks for _local_scalar_dense"
# What the host waits for outside the steps, by (function, what)
OUTSIDE = {("optim.py __init__", BLOCKS)}
OUTSIDE |= {("start.py open_start", BLOCKS)}
OUTSIDE |= {("train.py evaluate", BLOCKS), ("train.py evaluate", ASKS)}
SAMPLING = {("model.py generate", BLOCKS), ("model.py generate", READS)}
CHECKPOINTS = {("train.py is_finite", ASKS), ("checkpoint.py fill", BLOCKS)}
SAVING = {("checkpoint.py blocks", READS)}
ASYNC_SAVING = {("async_save.py copy_to_host", "to cpu, pinned, blocking")}


def test_every_stand_in_replaces_a_function_of_torch():
    """A stand-in that torch has renamed would let train.py ask for a real device."""
    assert not [name for name in fake_cuda.STAND_INS if not hasattr(torch.cuda, name)]


def play(argv: list[str]) -> tuple[Counter, list[str]]:
    """Run train.py on this rank; return its crossings and refusals."""
    fake_cuda.install()
    fakes = fake_cuda.Fakes()
    gpu = fake_cuda.Gpu(fakes)
    build, train_step, save = train.build, train.train_step, train.save

    def outside_of_steps(function):
        def call(*arguments, **options):
            with mock.patch.object(gpu, "part", "outside"):
                return function(*arguments, **options)

        return call

    def build_and_free(*arguments, **options):
        with mock.patch.object(torch.cuda, "empty_cache") as empty_cache:
            built = build(*arguments, **options)
        empty_cache.assert_called_once()  # frees the memory of the full tensors
        return built

    def step(*arguments):
        gpu.part = "loop"
        return train_step(*arguments)

    def save_and_wait(state, run, start, saver):
        save(state, run, start, saver)
        saver.wait()  # fake tensors are not made for two threads

    names = ("evaluate", "print_sample")
    outside = {name: outside_of_steps(getattr(train, name)) for name in names}
    outside["save"] = outside_of_steps(save_and_wait)
    patches = mock.patch.multiple(train, build=build_and_free, train_step=step, **outside)
    with patches, fakes, gpu, contextlib.redirect_stdout(io.StringIO()):
        assert train.command(argv) == 0
    return gpu.crossings, gpu.refusals


class Gpus(Pool):
    start_method = "spawn"  # a library is preloaded when a process starts

    def __init__(self, library):
        super().__init__()
        self.library = library

    def start(self) -> None:
        preload = {"LD_PRELOAD": str(self.library), "OMP_NUM_THREADS": "1"}
        with mock.patch.dict(os.environ, preload):
            super().start()


@pytest.fixture(scope="module")
def gpus(tmp_path_factory):
    if sys.platform != "linux":
        pytest.skip("LD_PRELOAD of the library needs Linux")
    if not shutil.which("c++"):
        pytest.skip("no C++ compiler (c++) here")
    if torch.backends.cuda.is_built():
        pytest.skip("this torch has real CUDA devices")
    ranks = Gpus(fake_cuda.compile_library(tmp_path_factory.mktemp("library")))
    yield ranks
    ranks.stop()


@pytest.mark.slow(proves="what only a CUDA device's code paths do")
@pytest.mark.parametrize("text, ranks, accum", CASES)
def test_a_step_does_not_wait_for_the_gpu(gpus, tokens, tmp_path, text, ranks, accum):
    """Kernels accept their operands, and a run that saves continues from its checkpoint."""
    dp_size = ranks // 2 if "--tp 2" in text else ranks
    few = f"--n_layer 1 --micro_batch_size 1 --global_batch_size {accum * dp_size}"
    few += " --eval_sequences 1 --checkpoint none"
    argv = flags(f"--device cuda --data {tokens} --out {tmp_path}/run {few} --strategy {text}")
    allowed = OUTSIDE
    if "--sample_tokens" in text:
        allowed |= SAMPLING
    if "--checkpoint" in text:
        allowed |= CHECKPOINTS | (ASYNC_SAVING if "--async_save" in text else SAVING)
    starts = [(2, 2), (3, 1)] if "--checkpoint" in text else [(2, 2)]
    for max_steps, steps in starts:
        answers = gpus(ranks, play, [*argv, "--max_steps", str(max_steps)], timeout=200)
        for rank, (crossings, refusals) in enumerate(answers):
            assert not refusals
            in_loop = {
                ("train.py __next__", "to cuda, pinned"): steps * accum,
                ("log.py gather", "to cuda, pinned"): steps,
                ("log.py gather", "to cpu, pinned"): steps,
            }
            if "--optim_metrics_interval" in text and rank == 0:
                in_loop["optim.py rows", ASKS] = mock.ANY
            found = {tuple(what): n for (part, *what), n in crossings.items() if part == "loop"}
            assert found == in_loop
            assert {tuple(what) for part, *what in crossings if part != "loop"} <= allowed


def attention_shapes(config: ModelConfig, prompt: int, n: int, tp: int) -> set[tuple[int, ...]]:
    """Sample n tokens after a prompt on a GPU; return the shapes of attention's input."""
    fake_cuda.install()
    fakes = fake_cuda.Fakes()
    shapes = set()

    def see(attention, inputs) -> None:
        shapes.add(tuple(inputs[0].shape))

    with fakes, fake_cuda.Gpu(fakes):
        with torch.device("cuda"):
            model = Transformer(config)
        for block in model.blocks:
            block.attention.register_forward_pre_hook(see)
        size = {"seq_len": config.seq_len, "vocab_size": config.vocab_size}
        tokens = generate(model, [0] * prompt, n, Sampling(), **size, device="cuda", tp=tp)
        assert len(list(tokens)) == n
    return shapes


@pytest.mark.slow(proves="the shapes that a GPU's attention gets")
@pytest.mark.parametrize(
    "seq_len, tp, lengths",
    [
        (128, 1, [128]),  # tiny
        (1024, 1, [256, 384, 512]),  # gpt2-124m
        (1024, 3, [384, 768]),  # 128 is no multiple of tp
        (70, 1, [128]),  # longer than the model's context
    ],
)
def test_a_sample_needs_few_plans_of_attention(gpus, seq_len, tp, lengths):
    """Each new shape costs cuDNN about half a second."""
    config = dataclasses.replace(SIZES["tiny"], seq_len=seq_len)
    (shapes,) = gpus(1, attention_shapes, config, seq_len // 4, 256, tp)
    assert shapes == {(1, length, 128) for length in lengths}


def nccl_variables(before: dict[str, str]) -> dict[str, str]:
    """Start on a GPU with these variables; return those of NCCL's error handling."""
    fake_cuda.install()
    with mock.patch.dict(os.environ, before):
        dist.start("cuda")
        return {name: os.environ[name] for name in os.environ if name.startswith("TORCH_NCCL_")}


DUMP, RESTARTS = "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCHELASTIC_MAX_RESTARTS"


@pytest.mark.slow(proves="the environment that NCCL gets")
@pytest.mark.parametrize(
    "before, after",
    [
        ({}, {}),
        ({RESTARTS: "0"}, {}),
        ({RESTARTS: "1"}, {DUMP: "0"}),
        ({RESTARTS: "3", DUMP: "1"}, {DUMP: "1"}),
    ],
)
def test_nccl_keeps_the_error_handling_of_torch_and_the_user(gpus, before, after):
    """Except that no request to dump may be left in the store of torchrun, which may restart."""
    own = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    assert gpus(1, nccl_variables, before) == [after]
    assert gpus(1, nccl_variables, before | own) == [after | own]


def order_on_gpus() -> list[str]:
    fake_cuda.install()
    fakes = fake_cuda.Fakes()
    with fakes, fake_cuda.Gpu(fakes):
        return order_of_forward("cuda")


@pytest.mark.slow(proves="FSDP's prefetch on a device")
def test_a_gpu_holds_the_weights_of_one_unit_in_forward(gpus):
    """The host runs ahead, so the GPU gathers the next unit while it computes."""
    assert gpus(2, order_on_gpus) == [3 * ["gather", "multiply"]] * 2


def backend_on_gpus(device: str, backend: str | None) -> tuple[str, str]:
    """Return the devices of the mesh and of this rank, and the backends of the process group."""
    fake_cuda.install()
    world = dist.start(device, backend=backend)
    mesh = dist.make_mesh(world, (2, 2, 1))
    dist.on_all_ranks(int)  # no rank exits while another one is still connecting
    return f"{mesh.device_type} {world.device}", torch.distributed.get_backend_config()


@pytest.mark.slow(proves="more ranks than devices")
def test_ranks_can_share_a_gpu_through_gloo(gpus):
    shared = gpus(4, backend_on_gpus, "cuda:0", "gloo")
    assert shared == [("cuda cuda:0", "cpu:gloo,cuda:gloo")] * 4
    own = gpus(4, backend_on_gpus, "cuda", None)
    assert own == [(f"cuda cuda:{rank}", "cpu:gloo,cuda:nccl") for rank in range(4)]


def place_on_gpus(shape: tuple[int, int, int]) -> tuple[int, list[tuple]]:
    fake_cuda.install()
    return place_on_mesh(shape, "cuda")


@pytest.mark.slow(proves="the options of NCCL's groups")
def test_make_mesh_sets_name_and_timeout_of_nccl_groups(gpus):
    for rank, (_, groups) in enumerate(gpus(4, place_on_gpus, (2, 2, 1))):
        replicas, shards = [rank % 2, rank % 2 + 2], [rank // 2 * 2, rank // 2 * 2 + 1]
        ranks_of = {"dp_replicate": replicas, "dp_shard": shards, "tp": [rank]}
        assert groups == [(ranks, 77, name) for name, ranks in ranks_of.items()]
