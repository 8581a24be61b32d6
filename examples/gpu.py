"""Measure on one GPU what no GPU has measured yet, in two calls of 330 and 240 seconds.

python examples/gpu.py a OUT [NANOGPT]   # does it run, and how fast; NANOGPT: nanoGPT's folder
python examples/gpu.py b OUT             # saves, four ranks on one GPU, a slice of llama3-8b

The steps of a call are in the order of their value, since what does not fit goes from the end. A
step that fails or exceeds its limit does not stop the next one. OUT/a.json or OUT/b.json, written
after each step, contains the status, figures and last lines of every step. A prediction for each
row, and what a result decides, stand in examples/waiting-for-a-gpu.md. Without a GPU this is a dry
run: the model is tiny, nothing is compiled, and steps that need a GPU are skipped.
"""

import gzip
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as attention

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import dist
import optim
from model import SIZES, meta_model

THIS = Path(__file__).resolve()
ROOT = THIS.parent.parent
SECONDS = {"a": 330, "b": 240}  # of a call, with the step that runs at the end
GRACE = 5  # seconds that a step gets to end after SIGTERM
LEAST = 15  # no step starts with fewer seconds left

# --------------------------------------------------------------------------------------------------
# The steps


@dataclass(frozen=True)
class Step:
    expected: int  # seconds on an H100, estimated
    limit: int  # seconds
    command: str
    needs_gpu: bool = False


# A short run that logs every step, and evaluates once, at the end
TRAIN = (
    "PYTHON train.py --data WORK/tokens --out WORK/NAME --warmup_steps 5 --log_interval 1 "
    "--eval_interval 0 --eval_sequences 32 --keep_last 0 --save_interval 0 --sample_tokens 0 "
)
GPT2 = TRAIN + "--model gpt2-124m --micro_batch_size 32 --global_batch_size 32 --max_steps 30 "
OLMO = TRAIN + "--model olmo-1b --micro_batch_size 8 --global_batch_size 8 --max_steps 14 "
LLAMA = (
    TRAIN + "--model llama3-8b --n_layer 3 --micro_batch_size 2 --global_batch_size 2 "
    "--max_steps 14 --activation_checkpointing selective --loss_chunks 4 "
)
SAVES = GPT2 + "--keep_last 2 --save_interval 10 --out WORK/saves "
NANOGPT = (
    "env -C WORK/nanoGPT PYTHON train.py config/train_shakespeare_char.py --dataset=WORK/tokens "
    "--n_layer=12 --n_head=12 --n_embd=768 --block_size=1024 --batch_size=32 --dropout=0.0 "
    "--max_iters=40 --lr_decay_iters=140 --log_interval=1 "
)
CHECK = (
    "PYTHON -m tools.check --strategy fsdp --compile --data WORK/tokens --model gpt2-124m "
    "--micro_batch_size 2"
)

STEPS = {
    "a": {
        "ceilings": Step(15, 60, "PYTHON THIS ceilings", needs_gpu=True),
        "eager": Step(40, 90, GPT2 + "--profile 20:22 --sample_tokens 256"),
        "gpu-tests": Step(40, 90, "PYTHON -m pytest -m gpu", needs_gpu=True),
        "compiled": Step(60, 120, GPT2 + "--profile 20:22 --compile"),
        "nanogpt": Step(65, 130, NANOGPT),
        "1b-compiled": Step(65, 120, OLMO + "--compile"),
        "1b-eager": Step(35, 60, OLMO),
        "fsdp": Step(30, 60, GPT2 + "--profile 20:22 --strategy fsdp"),
    },
    "b": {
        "saves": Step(35, 70, SAVES + "--async_save"),
        "saves-resumed": Step(30, 60, SAVES + "--async_save false --max_steps 40"),
        "one-rank": Step(20, 60, "PYTHON THIS ranks WORK/tokens"),
        "four-ranks": Step(45, 90, "TORCHRUN --nproc_per_node 4 THIS ranks WORK/tokens"),
        "check": Step(80, 100, CHECK),
        "llama-slice": Step(70, 110, LLAMA + "--compile"),
        "loss-chunks": Step(40, 70, GPT2 + "--compile --loss_chunks 4"),
    },
}
TINY = {  # in a dry run
    "gpt2-124m": "tiny",
    "olmo-1b": "tiny",
    "llama3-8b": "tiny",
    "--n_layer 3 ": "",
    " --compile": "",
    "_batch_size 32": "_batch_size 4",
    "--n_layer=12 --n_head=12 --n_embd=768 --block_size=1024 --batch_size=32": "--n_layer=4 "
    "--n_head=4 --n_embd=128 --block_size=128 --batch_size=4 --device=cpu --compile=False",
}


def command_of(step: Step, name: str, work: Path) -> list[str]:
    """Return the words of a step's command; its files are in the folder `work`."""
    text = step.command
    if not torch.cuda.is_available():
        for long, short in TINY.items():
            text = text.replace(long, short)
    text = text.replace("TORCHRUN", "PYTHON -m torch.distributed.run --standalone")
    values = {"PYTHON": sys.executable, "THIS": THIS, "WORK": work, "NAME": name}
    # In one pass: a path that is filled in may contain a key.
    return [
        re.sub("|".join(values), lambda key: str(values[key[0]]), word) for word in text.split()
    ]


# --------------------------------------------------------------------------------------------------
# What a GPU reaches


def ceilings() -> dict[str, float]:
    """Return the speeds that tools/plan.py assumes, and the seconds of a new shape."""
    found = {"cudnn": torch.backends.cudnn.version()}
    a, b = torch.empty(2, 2**31, dtype=torch.uint8, device="cuda")
    copy = min(seconds(lambda: a.copy_(b)) for _ in range(3))
    found["copy, TB/s"] = 2 * a.nbytes / copy / 1e12  # read and written
    products, attentions = [], []
    for m, k, n in (
        (8192, 8192, 8192),
        (32768, 768, 768),  # gpt2-124m: q, k, v, out
        (32768, 768, 50304),  # and its head
        (16384, 2048, 8192),  # olmo-1b: gate, up
    ):
        x, weight = random(m, k).detach(), random(n, k).detach()
        product = min(seconds(partial(torch.mm, x, weight.T)) for _ in range(3))
        products.append(2 * m * k * n / product / 1e12)
        found[f"{m} x {k} x {n}, TFLOP/s"] = products[-1]
    for shape in ((32, 12, 1024, 64), (8, 16, 2048, 128), (2, 32, 8192, 128), (1, 12, 384, 64)):
        of_kernels = []
        for kernel in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
            speeds = attention_speed(shape, kernel)
            for name, value in speeds.items():
                size = " x ".join(map(str, shape))
                found[f"{kernel.name} {size}, {name}"] = value
            # Two products forward and five backward
            of_kernels.append(7 / (2 / speeds["TFLOP/s"] + 5 / speeds["backward, TFLOP/s"]))
        attentions.append(max(of_kernels))
    # What tools.plan reads
    found["products, TFLOP/s"] = max(products)
    found["attention, TFLOP/s"] = statistics.median(attentions)
    return found


def seconds(function, times: int = 10) -> float:
    """Return the mean seconds of a call on the GPU."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        function()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / times


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def attention_speed(shape: tuple[int, int, int, int], kernel: SDPBackend) -> dict[str, float]:
    """Return the seconds of the first forward and backward, and the speed of the later ones."""
    B, H, T, d_head = shape
    q, k, v = (random(*shape) for _ in range(3))
    product = 2 * B * H * T * T * d_head / 2  # FLOPs of one product with the causal half
    with sdpa_kernel(kernel):
        forward = partial(attention, q, k, v, is_causal=True, enable_gqa=False)
        found = {"first, s": seconds(forward, times=1)}
        found["TFLOP/s"] = 2 * product / seconds(forward) / 1e12
        y = forward()
        backward = partial(torch.autograd.grad, y, (q, k, v), q.detach(), retain_graph=True)
        found["first backward, s"] = seconds(backward, times=1)
        found["backward, TFLOP/s"] = 5 * product / seconds(backward) / 1e12
    return found


# --------------------------------------------------------------------------------------------------
# Four ranks on one GPU


def train_on_ranks(tokens: Path, steps: int = 5, sequences: int = 8) -> dict:
    """Train in float32 on one rank, or with hsdp on 2 x 2 ranks that share a GPU through gloo.

    Everything but NCCL is as on four GPUs: FSDP's kernels and streams, and both axes of the mesh.
    """
    has_gpu = torch.cuda.is_available()
    world = share_device()
    shape = (2, 2, 1) if world.size == 4 else (1, 1, 1)
    mesh = dist.make_mesh(world, shape)
    config = SIZES["gpt2-124m" if has_gpu else "tiny"]
    decoder = meta_model(config)
    strategy = dist.Settings(strategy="hsdp" if world.size == 4 else "single", wrap="block")
    model = dist.parallelize(decoder, mesh, strategy, partial(decoder.init_tensor, seed=0))
    settings = optim.Settings(lr=1e-3, max_steps=steps)
    optimizer = optim.Optimizer(decoder.named_parameters(), decoder.decays, settings)
    ids = np.fromfile(tokens / "train.bin", dtype=np.uint16).astype(np.int64) % config.vocab_size
    batches = ids[: steps * sequences * (config.seq_len + 1)]
    batches = torch.from_numpy(batches).view(steps, sequences, config.seq_len + 1)
    found = {"losses": [], "grad_norms": []}
    for step, batch in enumerate(batches, start=1):
        local = batch.chunk(world.size)[dist.dp_rank(mesh)].to(world.device)
        micro_batches = local.split(1)
        loss = torch.zeros((), device=world.device)
        for i, micro_batch in enumerate(micro_batches):
            is_last = i == len(micro_batches) - 1
            with dist.gradient_sync(model, "batch", is_last):
                micro_loss = model(micro_batch[:, :-1], micro_batch[:, 1:]) / len(micro_batches)
                micro_loss.backward()
            loss += micro_loss.detach()
        torch.distributed.all_reduce(loss)
        found["losses"].append(loss.item() / world.size)
        values, _ = optimizer.step(step, settings.lr)
        found["grad_norms"].append(values["grad_norm"].item())
    found["peak_device_memory"] = torch.cuda.max_memory_allocated() if has_gpu else 0
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return found


def share_device() -> dist.World:
    """Join the ranks like dist.join, but all of them on the first GPU, which NCCL would refuse."""
    timeout = timedelta(seconds=60)
    store, rank, size = dist.find_ranks(timeout)
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if has_gpu else torch.device("cpu")
    backend = "cpu:gloo,cuda:gloo" if has_gpu else "gloo"
    place = {"store": store, "rank": rank, "world_size": size}
    torch.distributed.init_process_group(backend, timeout=timeout, **place)
    return dist.World(rank, size, size, device, timeout, device_name="", has_bfloat16=has_gpu)


# --------------------------------------------------------------------------------------------------
# Running the steps


def run_steps(
    steps: dict[str, Step], total: float, file: Path, nanogpt: Path | None = None
) -> dict[str, dict]:
    """Run steps for `total` seconds; return what `file` then contains about each step."""
    ends = time.monotonic() + total
    has_gpu = torch.cuda.is_available()
    found = {
        "device": torch.cuda.get_device_name() if has_gpu else "CPU: a dry run with tiny",
        "torch": torch.__version__,
        "started": datetime.now().astimezone().isoformat(" ", "seconds"),
        "steps": {},
    }
    with tempfile.TemporaryDirectory(prefix="nanoshard-gpu-") as folder:
        work = Path(folder)
        write_tokens(work / "tokens")
        if nanogpt:
            copy_nanogpt(nanogpt, work / "nanoGPT")
        for name, step in steps.items():
            limit = min(step.limit, ends - time.monotonic() - GRACE)
            if reason := reason_to_skip(name, step, nanogpt):
                result = {"status": f"skipped: {reason}", "seconds": 0}
            elif limit < min(step.limit, LEAST):
                result = {"status": "cut: no time left", "seconds": 0}
            else:
                result = run_step(command_of(step, name, work), work / f"{name}.txt", limit)
                with suppress(ValueError, LookupError, OSError):  # a step that failed has none
                    result["figures"] = figures(name, work, found["steps"])
            found["steps"][name] = result
            file.write_text(json.dumps(found, indent=1) + "\n")
            print(describe(name, result), flush=True)
        for trace in work.glob("eager/profile/rank_0.trace.json"):
            compressed = gzip.compress(trace.read_bytes())
            file.with_name("eager.trace.json.gz").write_bytes(compressed)
    return found["steps"]


def reason_to_skip(name: str, step: Step, nanogpt: Path | None) -> str:
    """Return why a step cannot run here; an empty string if it can."""
    if step.needs_gpu and not torch.cuda.is_available():
        return "needs a GPU"
    return "needs nanoGPT's folder" if name == "nanogpt" and not nanogpt else ""


def print_expectation(steps: dict[str, Step], total: float, nanogpt: Path | None) -> None:
    """Print which steps will probably run, and which ones the limit will cut."""
    by = 0
    for name, step in steps.items():
        reason = reason_to_skip(name, step, nanogpt)
        by += 0 if reason else step.expected
        verdict = reason or ("fits" if by <= total else "will probably be cut")
        print(f"{name:14} about {step.expected:3} s, by {by:3} of {total} s: {verdict}", flush=True)


def write_tokens(folder: Path) -> None:
    """Write random tokens of GPT-2's vocabulary, some rarer than others, in nanoGPT's format."""
    folder.mkdir()
    random_numbers = np.random.default_rng(0).random(4_000_000)
    ids = (50257 * random_numbers**4).astype(np.uint16)
    for split in ("train", "val"):
        ids.tofile(folder / f"{split}.bin")


def copy_nanogpt(source: Path, folder: Path) -> None:
    """Copy nanoGPT without its evaluation at step 0, which would compile a second graph."""
    ignored = shutil.ignore_patterns(".git", "data", "out*")
    shutil.copytree(source, folder, ignore=ignored)
    trainer = folder / "train.py"
    text = trainer.read_text()
    trainer.write_text(text.replace("if iter_num % eval_interval == 0 and", "if False and"))


def run_step(command: list[str], output: Path, limit: float) -> dict:
    """Run a command, and end it after `limit` seconds; return its status and last lines."""
    began = time.monotonic()
    with open(output, "w") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,  # so that all processes of a step end with it
        )
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = f"ended after {limit:.0f} s"
        finally:
            end(process)
    lines = output.read_text(errors="replace").splitlines()
    return {"status": status, "seconds": time.monotonic() - began, "last_lines": lines[-25:]}


def end(process: subprocess.Popen) -> None:
    """Terminate a step that still runs, and kill what is left of its processes."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)  # torchrun ends its ranks
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# --------------------------------------------------------------------------------------------------
# The figures of a step


def figures(name: str, work: Path, earlier: dict[str, dict]) -> dict:
    """Return what a step measured. Raises ValueError, LookupError or OSError if it did not."""
    lines = (work / f"{name}.txt").read_text(errors="replace").splitlines()
    if name == "nanogpt":
        times = [float(line.split("time ")[1].split("ms")[0]) for line in lines if "time " in line]
        return {"step_time": statistics.median(times[10:]) / 1e3, "first_step": times[0] / 1e3}
    folder = work / ("saves" if name.startswith("saves") else name)
    if not (folder / "metrics.jsonl").exists():
        if name == "check":
            return {"table": lines[lines.index("") + 1 :]}
        found = json.loads(lines[-1])
        if name == "four-ranks":
            for key in ("losses", "grad_norms"):
                pairs = zip(found[key], earlier["one-rank"]["figures"][key])
                found[f"{key}, relative"] = max(abs(here / there - 1) for here, there in pairs)
        return found
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    if name == "saves-resumed":
        rows = [row for row in rows if row["step"] > 30]
    steps = [row for row in rows if "loss" in row]
    found = {"losses": [row["loss"] for row in steps], "first_step": steps[0]["step_time"]}
    for key in ("step_time", "tokens_per_second", "mfu"):
        found[key] = statistics.median(row[key] or 0 for row in steps[-10:])
    for key in ("peak_device_memory", "peak_host_memory"):
        found[key] = max(row[key] for row in steps)
    last_row = datetime.fromisoformat(rows[-1]["time"]).timestamp()
    found["seconds_after_last_row"] = (work / f"{name}.txt").stat().st_mtime - last_row
    found["saves"] = [row for row in rows if row.get("event") == "checkpoint"]
    for file in folder.glob("profile/rank_0.json"):
        found["profile"] = json.loads(file.read_text())
    return found


def describe(name: str, result: dict) -> str:
    """Return a line about a step."""
    found = result.get("figures", {})
    shown = ("step_time", "tokens_per_second", "mfu", "losses, relative")
    numbers = ", ".join(f"{key} {found[key]:.4g}" for key in shown if key in found)
    return f"{name:14} {result['seconds']:4.0f} s  {result['status'] or 'ok'}  {numbers}"


def main(argv: list[str]) -> int:
    if argv == ["ceilings"]:
        print(json.dumps(ceilings()))
        return 0
    if argv[:1] == ["ranks"] and len(argv) == 2:
        found = train_on_ranks(Path(argv[1]))
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps(found))
        return 0
    if argv[:1] not in (["a"], ["b"]) or not 2 <= len(argv) <= 3:
        print(__doc__, file=sys.stderr)
        return 2
    call, out, *nanogpt = argv
    folder = Path(nanogpt[0]) if nanogpt else None
    if folder and not (folder / "train.py").exists():
        print(f"gpu.py: error: {folder} has no train.py: clone nanoGPT", file=sys.stderr)
        return 2
    Path(out).mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print_expectation(STEPS[call], SECONDS[call], folder)
    try:
        results = run_steps(STEPS[call], SECONDS[call], Path(out) / f"{call}.json", folder)
    except KeyboardInterrupt:
        return 130
    statuses = [result["status"] for result in results.values()]
    return int(any(status and "skipped" not in str(status) for status in statuses))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
