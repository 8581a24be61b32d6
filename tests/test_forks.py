"""The forks of docs/forking.md apply, compose, train alike on every mesh, and do what it says.

Each is put into a copy of the repository. Functions whose names begin with `fork_` or `only_` run
there, in a process that imports the fork's files.
"""

import itertools
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import rig
import torch
from rig import ROOT, Run, run_command
from torch.nn.functional import cross_entropy

import model

# A patch of examples/ or a snippet of the page -> its flags
FORKS = {
    "z-loss": "--z_loss 0.01",
    "qwen3": "--qk_norm",
    "document-mask": "--end_of_text 256",
    "diloco": "--optimizer diloco --eval_interval 20 --save_interval 20",
    "chat": "",
    "wsd-sqrt": "--schedule wsd-sqrt",
    "share": "--clip share --max_grad_norm 0.1",
    "halve": "--clip halve",
    "gelu": "",
    "window": "--seq_len 32",
}
MESHES = {"--strategy ddp": 2, "--strategy fsdp": 2, "--strategy hsdp --dp_shard 2": 4, "--tp 2": 2}

PATCHES = sorted(ROOT.glob("examples/*.patch"))
PAGE = (ROOT / "docs/forking.md").read_text()
# name -> (file, kind, code), as the page and README.md show them
SNIPPETS = {
    name: (file, kind, code)
    for kind, name, file, code in re.findall(
        r"^```(\w+)\n(?:#|@@) (\S+): (?:in|at the end of) (\S+)\n(.*?)^```", PAGE, re.M | re.S
    )
}
(halve,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
SNIPPETS["halve"] = ("optim.py", "python", halve)


def git(*arguments, folder: Path) -> None:
    subprocess.check_call(["git", *arguments], cwd=folder)


def clone(code: Path) -> Path:
    """Clone the repository, and commit there what has changed in this working tree."""
    git("clone", "--quiet", "--shared", ROOT, code, folder=ROOT)
    both = [f"--git-dir={code}/.git", f"--work-tree={ROOT}"]
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    git(*both, "add", "--all", folder=ROOT)
    git(*both, *author, "commit", "--allow-empty", "--message=now", folder=ROOT)
    git("reset", "--hard", folder=code)
    return code


def insert(name: str, code: Path) -> None:
    """Put a snippet at the end of its file, or in place of the lines that it removes."""
    file, kind, text = SNIPPETS[name]
    source = (code / file).read_text()
    if kind == "diff":
        old, new = ("\n".join(re.findall(rf"^\{sign}(.*)", text, re.M)) for sign in "-+")
        assert source.count(old) == 1, f"{file} has other lines than those that {name} removes"
        source = source.replace(old, new)
    else:
        source += f"\n\n{text}"
    (code / file).write_text(source)


def test_each_fork_of_the_page_applies_and_any_two_patches_compose(tmp_path):
    """In either order, as docs/forking.md says: with --3way, like commits that are rebased."""
    only_one = sorted(({patch.stem for patch in PATCHES} | {*SNIPPETS}) ^ {*FORKS})
    assert not only_one, f"only docs/forking.md, or only FORKS in this file, has {only_one}"
    code = clone(tmp_path / "code")
    for one, other in itertools.permutations(PATCHES, 2):
        git("apply", "--index", one, folder=code)
        git("apply", "--3way", other, folder=code)
        git("reset", "--hard", folder=code)
    for name in SNIPPETS:
        insert(name, code)


# --------------------------------------------------------------------------------------------------
# Each fork in a copy of the repository


def call(name: str, folder: Path, function: Callable, *arguments) -> None:
    """Call a function of this file in a process that imports the files of a fork."""
    code = clone(folder / "code")
    if name in SNIPPETS:
        insert(name, code)
    else:
        git("apply", ROOT / f"examples/{name}.patch", folder=code)
    script = f"import sys, test_forks\ntest_forks.{function.__name__}(*sys.argv[1:])"
    command = [sys.executable, "-c", script, *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(code / "tests")}
    process = subprocess.run(command, cwd=code, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr


@pytest.mark.slow(proves="what a fork trains and prints")
@pytest.mark.parametrize("name", FORKS)
def test_a_fork_trains_alike_on_every_mesh(name, tmp_path, tokens):
    call(name, tmp_path, fork_trains, name, tokens, tmp_path)


def fork_trains(name: str, tokens: str, folder: str) -> None:
    """Compare 20 steps on every mesh with those of one rank, and show what the fork is for."""
    assert Path(model.__file__).is_relative_to(folder)
    if name == "chat":
        tokens = write_chats(folder)

    def train(ranks: int, text: str) -> Run:
        """Train with the flags of the fork in a new run."""
        out = Path(folder, f"run-{text}".replace(" ", ""))
        run = rig.train(ranks, Path(tokens), out, f"--max_steps 20 {FORKS[name]} {text}")
        assert run.status == 0, run.error
        return run

    try:
        single = train(1, "")
        for mesh, ranks in MESHES.items():
            if name == "diloco" and mesh not in ("--strategy fsdp", "--tp 2"):
                continue  # there several replicas train alone
            run = train(ranks, mesh)
            rig.assert_close(run.out, single.out, relative=1e-4)
            losses = [[row["val_loss"] for row in each.rows("val_loss")] for each in (run, single)]
            assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        if prove := globals().get(f"only_{name.replace('-', '_')}"):
            prove(train)
    finally:
        rig.POOL.stop()


# --------------------------------------------------------------------------------------------------
# What only one of them does

SIZES = dict(vocab_size=320, n_head=4, n_kv_head=2, d_model=32, d_ff=64, seq_len=24)


def only_z_loss(train) -> None:
    """It is added to the loss of training, also in chunks, but not to that of an evaluation."""
    runs = [train(1, f"--max_steps 1 --lr 0 {text}") for text in ("--z_loss 0", "--loss_chunks 4")]
    losses, val_losses = ([run.rows(key)[0][key] for run in runs] for key in ("loss", "val_loss"))
    assert val_losses[1] == pytest.approx(val_losses[0], rel=1e-6)
    # At the start all 320 logits are close to 0.
    assert losses[1] - losses[0] == pytest.approx(0.01 * math.log(320) ** 2, rel=0.01)


def only_document_mask(train) -> None:
    """Packed documents have the loss and gradients of documents that are alone."""
    net = rig.build_model(model.ModelConfig(n_layer=2, end_of_text=256, **SIZES))

    def sums(texts: list) -> tuple:
        net.zero_grad()
        loss = sum(net(text[:, :-1], text[:, 1:]) * (text.size(1) - 1) for text in texts)
        loss.backward()
        return loss.item(), [weight.grad.clone() for weight in net.parameters()]

    packed = torch.randint(256, (2, 25), generator=torch.Generator().manual_seed(0))
    packed[:, [6, 17]] = 256  # the last document goes on
    documents = [packed[:, :7], packed[:, 7:18], packed[:, 18:]]
    torch.testing.assert_close(sums([packed]), sums(documents), rtol=1e-4, atol=1e-5)


def only_diloco(train) -> None:
    """Replicas communicate only in every 20th step."""
    met = []
    for last in (19, 20):  # the step after the window is the one whose collectives are counted
        run = train(4, f"--strategy hsdp --dp_shard 2 --max_steps 40 --profile 18:{last}")
        found = json.loads((run.out / "profile/rank_0.json").read_text())["communicated"]
        met.append({row["kind"]: row["bytes"] for row in found if row["axis"] == "dp_replicate"})
    parameters = sum(weight.numel() for name, weight in run.weights().items() if "model." in name)
    assert met == [{"all_reduce": 4 * parameters // 2}, {}]  # each of two shards


def write_chats(folder: str) -> str:
    """Write a folder of eight sequences, to train and to validate on, with a mask for each."""
    chats = Path(folder, "chats")
    chats.mkdir()
    random = np.random.default_rng(0)
    ids, mask = random.integers(256, size=8 * 16 + 1), random.random(8 * 16 + 1) < 0.3
    for split in ("train", "val"):
        ids.astype("<u2").tofile(chats / f"{split}.bin")
        mask.tofile(chats / f"{split}.mask")
    meta = {"tokenizer": "bytes", "dtype": "uint16", "vocab_size": 257}
    (chats / "meta.json").write_text(json.dumps(meta))
    return str(chats)


def only_chat(train) -> None:
    """The loss of all micro-batches and ranks is a mean over the tokens that the mask marks."""
    run = train(2, "--strategy ddp --micro_batch_size 2 --max_steps 1 --lr 0")
    net = rig.build_model(model.ModelConfig(n_layer=2, **SIZES))
    chats = run.out.with_name("chats")
    ids = torch.from_numpy(np.fromfile(chats / "train.bin", "<u2").astype(np.int64))
    counts = torch.from_numpy(np.fromfile(chats / "train.mask", np.bool_))[1:].view(8, 16)
    logits = net(ids[:-1].view(8, 16))
    expected = cross_entropy(logits[counts], ids[1:].view(8, 16)[counts]).item()
    for key in ("loss", "val_loss"):
        assert run.rows(key)[0][key] == pytest.approx(expected, rel=1e-5)


def only_share(train) -> None:
    """The first moment of a tensor has a tenth of its clipped gradient."""
    run = train(2, "--strategy fsdp --max_steps 1 --optim_metrics_interval 1")
    sizes = {name: weight.numel() for name, weight in run.weights().items() if "model." in name}
    rows = run.statistics()
    for row in rows:
        limit = 0.1 * (sizes[f"model.{row['parameter']}"] / sum(sizes.values())) ** 0.5
        assert 10 * row["exp_avg_norm"] == pytest.approx(min(limit, row["grad_norm"]), rel=1e-3)
        assert row["clipped"] == (row["grad_norm"] > limit)
    assert {row["clipped"] for row in rows} == {0, 1}


def only_window(train) -> None:
    """A token sees itself and 15 before it."""
    net = rig.build_model(model.ModelConfig(n_layer=1, **SIZES))
    tokens = torch.arange(24)[None]
    changed = tokens.clone()
    changed[0, 2] = 99
    differs = (net(tokens) != net(changed)).any(-1)[0].tolist()
    assert differs == [2 <= place < 2 + 16 for place in range(24)]


@pytest.mark.hf
def test_qwen3_has_the_logits_of_transformers(tmp_path):
    pytest.importorskip("transformers")
    call("qwen3", tmp_path, fork_exports_qwen3, tmp_path)


def fork_exports_qwen3(folder: str) -> None:
    import test_hf
    import transformers

    test_hf.FAMILIES["Qwen3"] = {"head_dim": 8}
    source = test_hf.make_model(transformers, "Qwen3", Path(folder, "source"))
    imported = test_hf.convert("import", source, Path(folder, "imported"))
    exported = test_hf.convert("export", imported, Path(folder, "exported"))
    model = test_hf.theirs(transformers, source)
    test_hf.assert_same_logits(test_hf.ours(imported), model)
    test_hf.assert_same_logits(test_hf.theirs(transformers, exported), model)


def test_chats_become_tokens_and_a_mask_or_are_refused(tmp_path):
    call("chat", tmp_path, fork_prepares_chats, tmp_path)


def fork_prepares_chats(folder: str) -> None:
    import prepare_chat

    file, out = Path(folder, "mine.jsonl"), Path(folder, "out")
    argv = ["--source", file, "--out", out, "--val_fraction", 0.5]
    question, answer = {"role": "user", "content": "2?"}, {"role": "assistant", "content": "4"}
    image = {"role": "user", "content": [{"type": "image_url"}]}
    for messages in ([question], [image, answer]):
        rows = [{"messages": [question, answer]}, {"messages": messages}]
        file.write_text("\n\n".join(map(json.dumps, rows)))
        status, _, error = run_command(argv, prepare_chat.run_command)
        assert status == 2 and f"{file}, line 3: " in error and not out.exists(), messages

    parts = {"role": "user", "content": [{"type": "text", "text": text} for text in "56"]}
    messages = [parts, answer | {"weight": 0}, answer, question]
    # Each line is another, because the line decides on the split.
    rows = [{"messages": messages, "n": n} for n in range(12)]
    file.write_text("\n".join(map(json.dumps, rows)))
    assert run_command(argv, prepare_chat.run_command)[0] == 0
    text = "user: 56\nassistant: 4$assistant: 4$user: 2?\n$"  # $ for the end of a text
    tokens = [256 if letter == "$" else ord(letter) for letter in text]
    start = text.rindex(" 4$")
    mask = [start <= place < start + 3 for place in range(len(text))]
    found = np.fromfile(out / "train.bin", "<u2").tolist()
    chats = len(found) // len(tokens)
    assert chats > 1 and found == tokens * chats
    assert [*(out / "train.mask").read_bytes()] == mask * chats
