"""Do two commits compute the same numbers? Losses, norms, statistics and weights, bit for bit.

python tests/record/golden.py 7719995 .              # a commit and the working tree
python tests/record/golden.py HEAD . --only "fsdp 2 float32"

Trains 60 steps with each commit's train.py, on every mesh, in both dtypes and with both
optimizers. Both commits run on this machine, and nothing is stored. A run is started by its command
line alone and types every flag whose default may change; NAMES maps what a commit calls otherwise.
Exit status 1 if anything differs.
"""

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent.parent
STEPS = 60
MESHES = {  # name -> (ranks, flags)
    "single": (1, "--strategy single"),
    "ddp 2": (2, "--strategy ddp"),
    "fsdp 2": (2, "--strategy fsdp"),
    "hsdp 2 x 2": (4, "--strategy hsdp --dp_replicate 2"),
    "tp 2": (2, "--strategy single --tp 2"),
    "fsdp 2 x tp 2": (4, "--strategy fsdp --tp 2"),
}
CASES = list(itertools.product(MESHES, ("float32", "bfloat16"), ("adamw", "muon")))
FLAGS = f"""
--model tiny --n_layer 2 --n_head 4 --n_kv_head 2 --d_model 32 --d_ff 64 --seq_len 16 --seed 3
--global_batch_size 16 --micro_batch_size 2 --max_steps {STEPS} --lr 4e-3 --min_lr 1e-4
--warmup_steps 5 --schedule linear --weight_decay 0.1 --beta1 0.9 --beta2 0.95 --eps 1e-8
--clip norm --max_grad_norm 1.0 --max_skipped 100 --wrap block --reshard_after_forward true
--grad_sync batch --activation_checkpointing none --loss_chunks 1 --compile false
--log_interval 1 --optim_metrics_interval 10 --eval_interval 20 --eval_sequences 10
--sample_tokens 0 --save_interval 0 --keep_last 2 --checkpoint sharded --async_save false
--device cpu --timeout 120
"""
# What a row's value is called here -> what an earlier or later commit calls it
NAMES: dict[str, str] = {}
COMPARED = ("loss", "grad_norm", "clipped", "skipped_steps", "lr", "tokens", "val_loss")


def write_tokens(folder: Path) -> None:
    """Write documents of invented words, which a model can learn, as bytes."""
    random = np.random.default_rng(0)
    words = [bytes(random.choice([*b"abcdefgh"], size)) for size in random.integers(2, 7, 50)]
    meta = {"tokenizer": "bytes", "dtype": "uint16", "vocab_size": 257}
    folder.mkdir()
    for split, documents in (("train", 40), ("val", 8)):
        texts = [b" ".join(words[i] for i in random.integers(0, 50, 150)) for _ in range(documents)]
        ids = np.concatenate([[*text, 256] for text in texts]).astype(np.uint16)
        ids.tofile(folder / f"{split}.bin")
        meta |= {f"{split}_tokens": len(ids), f"{split}_bytes": len(ids) - documents}
    (folder / "meta.json").write_text(json.dumps(meta))


def write_commit(commit: str, folder: Path) -> Path:
    """Return a folder with the files of a commit; `.` is the working tree."""
    if commit == ".":
        return ROOT
    folder.mkdir()
    archive = subprocess.run(
        ["git", "-C", ROOT, "archive", commit], stdout=subprocess.PIPE, check=True
    )
    subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
    return folder


def train(code: Path, case: tuple[str, str, str], tokens: Path, out: Path) -> None:
    """Run train.py of the commit in `code`. Prints its output and exits if it fails."""
    mesh, dtype, optimizer = case
    ranks, flags = MESHES[mesh]
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    words = f"{FLAGS} {flags} --dtype {dtype} --optimizer {optimizer}".split()
    words += ["--data", str(tokens), "--out", str(out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(code)}
    command = [*launcher, str(code / "train.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stderr[-3000:]}")


def numbers(out: Path) -> dict[str, float]:
    """Return every compared value of the logs by a name, such as `step 7 loss`."""
    found = {}
    for line in (out / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        for name in COMPARED:
            if (there := NAMES.get(name, name)) in row:
                found[f"step {row['step']} {name}"] = row[there]
    for line in (out / "optim.jsonl").read_text().splitlines():
        row = json.loads(line)
        if "parameter" not in row:  # of a start
            continue
        step, parameter = row.pop("step"), row.pop("parameter")
        found |= {f"step {step} {parameter} {name}": value for name, value in row.items()}
    return found


def tensors(out: Path) -> dict[str, np.ndarray]:
    """Return the full tensors of the newest checkpoint, as raw bytes of each element."""
    folder = max((out / "checkpoints").iterdir())
    index = json.loads((folder / "index.json").read_text())
    files = {path.name: read_safetensors(path) for path in folder.glob("*.safetensors")}
    found = {}
    for name, entry in index["tensors"].items():
        starts = entry["cuts"]  # in each dimension, the indices at which chunks begin
        chunks = itertools.product(*(range(len(cuts)) for cuts in starts))
        for place, number in zip(chunks, np.ravel(entry["grid"])):
            chunk = files[index["files"][number]][name]
            if name not in found:
                found[name] = np.zeros(entry["shape"], chunk.dtype)
            corner = [cuts[i] for cuts, i in zip(starts, place)]
            found[name][tuple(slice(a, a + n) for a, n in zip(corner, chunk.shape))] = chunk
    return found


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a safetensors file as unsigned integers of their elements' size."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    found = {}
    for name, entry in json.loads(raw[8 : 8 + size]).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            count = math.prod(entry["shape"])
            unsigned = np.dtype(f"u{(end - begin) // max(1, count)}")
            data = np.frombuffer(raw[8 + size + begin : 8 + size + end], unsigned)
            found[name] = data.reshape(entry["shape"])
    return found


def differences(one: Path, other: Path) -> list[str]:
    """Describe the values and tensors that differ between two runs."""
    found = []
    here, there = numbers(one), numbers(other)
    for name in sorted(here.keys() | there.keys(), key=lambda name: int(name.split()[1])):
        a, b = here.get(name), there.get(name)
        if a != b and not (a != a and b != b):
            found.append(f"{name}: {a} and {b}")
    here, there = tensors(one), tensors(other)
    for name in sorted(here.keys() | there.keys()):
        if name not in here or name not in there or not np.array_equal(here[name], there[name]):
            found.append(f"weights: {name}")
    losses = len([name for name in numbers(one) if "loss" in name])
    assert losses == STEPS + STEPS // 20, f"the logs have {losses} losses"
    assert len(tensors(one)) > 40, "the checkpoint has too few tensors"
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commits", nargs=2, metavar="COMMIT", help="`.` is the working tree")
    parser.add_argument("--only", nargs="*", default=[""], help="parts of the names of cases")
    args = parser.parse_args()
    differ = 0
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        root = Path(folder)
        write_tokens(root / "tokens")
        codes = [write_commit(name, root / f"code{i}") for i, name in enumerate(args.commits)]
        for case in CASES:
            name = " ".join(case)
            if not any(part in name for part in args.only):
                continue
            outs = [root / f"{name} {i}" for i in range(2)]
            for code, out in zip(codes, outs):
                train(code, case, root / "tokens", out)
            found = differences(*outs)
            differ += bool(found)
            count = len(numbers(outs[0])), len(tensors(outs[0]))
            first = f"{len(found)} differ, first {found[0]}" if found else "equal"
            print(f"{name:32} {count[0]} values, {count[1]} tensors: {first}", flush=True)
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
