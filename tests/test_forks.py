"""The forks of docs/forking.md apply, compose, train alike on every mesh, and do what it says.

Each is put into a copy of the repository. Functions whose names begin with `fork_` or `only_` run
there, in a process that imports the fork's files.
"""

import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import rig
import torch
from rig import ROOT, Run, cells, run_command
from torch.nn.functional import cross_entropy, gelu

import data
import model
import sample
import tokenizer

# A patch of examples/ or a snippet of the page | its flags
FORKS = dict(
    cells("""
z-loss        | --z_loss 0.01
qwen3         | --qk_norm
document-mask | --end_of_text 256
diloco        | --optimizer diloco --eval_interval 20 --save_interval 20
chat          |
wsd-sqrt      | --schedule wsd-sqrt
share         | --clip share --max_grad_norm 0.1
halve         | --clip halve
gelu          |
window        | --seq_len 32
""")
)
MESHES = {"--strategy ddp": 2, "--strategy fsdp": 2, "--strategy hsdp --dp_shard 2": 4, "--tp 2": 2}
TRAINED = pytest.mark.slow(proves="what a fork trains, exports or prints")

PAGE = (ROOT / "docs/forking.md").read_text()
PATCHES = sorted(ROOT.glob("examples/*.patch"))
# name -> (file, kind, code), as the page and README.md show them
SNIPPETS = {
    name: (file, kind, code)
    for kind, name, file, code in re.findall(
        r"^```(\w+)\n(?:#|@@) (\S+): (?:in|at the end of) (\S+)\n(.*?)^```", PAGE, re.M | re.S
    )
}
for code in re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S):
    if 'CLIPS["halve"]' in code:
        SNIPPETS["halve"] = ("optim.py", "python", code)


def git(*arguments, folder: Path, check: bool = True) -> bool:
    process = subprocess.run(["git", *arguments], cwd=folder, check=check, capture_output=True)
    return process.returncode == 0


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


def test_the_table_has_the_forks_of_the_page():
    found = {patch.stem for patch in PATCHES} | {*SNIPPETS}
    only_one = sorted(found ^ {*FORKS})
    assert not only_one, f"only docs/forking.md, or only FORKS in this file, has {only_one}"


def test_each_patch_applies_and_any_two_compose(tmp_path):
    """In either order, as docs/forking.md says: with --3way, like commits that are rebased."""
    git("init", "--quiet", folder=tmp_path)
    # The old versions that patches name, from which git merges
    command = ["git", "rev-parse", "--git-path", "objects"]
    objects = ROOT / subprocess.check_output(command, cwd=ROOT, text=True).strip()
    (tmp_path / ".git/objects/info/alternates").write_text(f"{objects}\n")
    files = subprocess.check_output(["git", "ls-files", "*.py"], cwd=ROOT, text=True).split()
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / file, tmp_path / file)
    git("add", "--all", folder=tmp_path)
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    git(*author, "commit", "--quiet", "-m", "all", folder=tmp_path)
    for one, other in itertools.permutations(PATCHES, 2):
        assert git("apply", "--index", one, folder=tmp_path, check=False), one.stem
        composes = git("apply", "--3way", other, folder=tmp_path, check=False)
        assert composes, f"{one.stem}, {other.stem}"
        git("reset", "--quiet", "--hard", folder=tmp_path)


@pytest.mark.parametrize("name", SNIPPETS)
def test_a_snippet_fits_into_its_file(name, tmp_path):
    file, _, _ = SNIPPETS[name]
    shutil.copy(ROOT / file, tmp_path)
    insert(name, tmp_path)
    compile((tmp_path / file).read_text(), file, "exec")


# --------------------------------------------------------------------------------------------------
# Each fork in a copy of the repository


def copy_fork(name: str, code: Path) -> Path:
    unwanted = shutil.ignore_patterns(".git", "runs", "tokens", "tests", "__pycache__")
    shutil.copytree(ROOT, code, ignore=unwanted)
    (code / "tests").mkdir()
    for file in ("rig.py", "test_forks.py"):
        shutil.copy(ROOT / "tests" / file, code / "tests")
    if name in SNIPPETS:
        insert(name, code)
    else:
        git("apply", ROOT / f"examples/{name}.patch", folder=code)
    return code


def call(code: Path, function: Callable, *arguments) -> None:
    """Call a function of this file in a process that imports the files of a fork."""
    script = f"import sys, test_forks\ntest_forks.{function.__name__}(*sys.argv[1:])"
    command = [sys.executable, "-c", script, *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(code / "tests")}
    process = subprocess.run(command, cwd=code, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr


@TRAINED
@pytest.mark.parametrize("name", FORKS)
def test_a_fork_trains_alike_on_every_mesh(name, tmp_path, tokens):
    call(copy_fork(name, tmp_path / "code"), fork_trains, name, tokens, tmp_path)


def fork_trains(name: str, tokens: str, folder: str) -> None:
    """Compare 20 steps on every mesh with those of one rank, and show what the fork is for."""
    assert Path(model.__file__).is_relative_to(folder)
    if name == "chat":
        tokens = write_chats(folder)

    def train(ranks: int, text: str, run: str = "") -> Run:
        """Train with the flags of the fork in a new run, or in one with this name."""
        out = Path(folder, run or f"run-{text}".replace(" ", ""))
        argv = rig.arguments(Path(tokens), out, f"--max_steps 20 {FORKS[name]} {text}")
        answers = rig.POOL(ranks, run_command, argv)
        assert {status for status, _, _ in answers} == {0}, answers
        return Run(out, *answers[0])

    try:
        single = train(1, "")
        for mesh, ranks in MESHES.items():
            if name == "diloco" and mesh not in ("--strategy fsdp", "--tp 2"):
                continue  # there several replicas train alone
            run = train(ranks, mesh)
            rig.assert_close(run.out, single.out, relative=1e-4)
            losses = [[row["val_loss"] for row in each.rows("val_loss")] for each in (run, single)]
            assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        globals()[f"only_{name.replace('-', '_')}"](train)
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


def only_qwen3(train) -> None:
    """The scale of queries and keys does not matter."""
    net = rig.build_model(model.ModelConfig(n_layer=1, qk_norm=True, **SIZES))
    tokens = torch.arange(24)[None]
    before = net(tokens)
    for layer in (net.blocks[0].attention.q, net.blocks[0].attention.k):
        layer.weight.data *= 100
    torch.testing.assert_close(net(tokens), before, rtol=1e-3, atol=1e-3)


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
    flags = "--strategy hsdp --dp_shard 2 --max_steps 40"
    met = []
    for last in (19, 20):  # the step after the window is the one whose collectives are counted
        run = train(4, f"{flags} --profile 18:{last}", f"until-{last}")
        found = json.loads((run.out / "profile/rank_0.json").read_text())["communicated"]
        met.append({row["kind"]: row["bytes"] for row in found if row["axis"] == "dp_replicate"})
    parameters = sum(weight.numel() for name, weight in run.weights().items() if "model." in name)
    assert met == [{"all_reduce": 4 * parameters // 2}, {}]  # each of two shards
    # A run continues on another mesh, from an outer update.
    more = train(2, "--strategy hsdp --dp_shard 1 --max_steps 60", run.out.name)
    assert [row["step"] for row in more.rows("val_loss")] == [20, 40, 60]


def load(path: str | Path) -> model.Transformer:
    config = sample.read_trained(Path(path)).config
    return sample.load_model(Path(path), config, torch.device("cpu"))


def only_chat(train) -> None:
    """The loss of all micro-batches and ranks is a mean over the tokens that the mask marks."""
    run = train(2, "--strategy ddp --micro_batch_size 2 --max_steps 1 --lr 0 --eval_sequences 999")
    net = load(rig.last_checkpoint(run.out))
    for key, split in (("loss", "train"), ("val_loss", "val")):
        file = Path(run.out.parent, f"chats/{split}.bin")
        tokens = torch.from_numpy(np.fromfile(file, "<u2").astype(np.int64))
        mask = torch.from_numpy(np.fromfile(file.with_suffix(".mask"), np.bool_))
        assert {*bytes(tokens[mask].clamp(max=255).tolist())} <= {*b" 0123456789\xff"}
        assert 1000 < mask.sum() < len(mask) / 2 or split == "val"
        windows = range((len(tokens) - 1) // 16)
        if split == "train":
            windows = [data.window_of(n, len(windows), 0) for n in range(8)]
        losses = []
        for start in (16 * window for window in windows):
            counts = mask[start + 1 : start + 17]
            logits = net(tokens[None, start : start + 16])[0][counts]
            targets = tokens[start + 1 : start + 17][counts]
            losses.append(cross_entropy(logits, targets, reduction="none"))
        assert run.rows(key)[0][key] == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)
    mask = file.with_name("train.mask")
    mask.write_bytes(bytes(mask.stat().st_size))  # no answer at all
    rows = train(4, "--strategy ddp --max_steps 3", "none").rows()
    assert [(row["loss"], row["grad_norm"], row["answers"]) for row in rows] == 3 * [(0, 0, 0)]


def only_wsd_sqrt(train) -> None:
    rates = [row["lr"] / 3e-3 for row in train(1, "--max_steps 11").rows()]
    assert rates == pytest.approx([1] * 10 + [1 - 0.5**0.5])


def first_update(train) -> tuple[list[tuple[dict, float]], dict[str, int]]:
    """The statistics of step 1, each with the norm of the clipped gradient; the sizes of tensors.

    The moment of a tensor has a tenth of its clipped gradient.
    """
    run = train(2, "--strategy fsdp --max_steps 1 --optim_metrics_interval 1")
    weights = run.weights()
    rows = [(row, 10 * row["exp_avg_norm"]) for row in run.statistics()]
    assert {row["clipped"] for row, _ in rows} == {0, 1}
    return rows, {row["parameter"]: weights[f"model.{row['parameter']}"].numel() for row, _ in rows}


def only_share(train) -> None:
    found, sizes = first_update(train)
    for row, norm in found:
        limit = 0.1 * (sizes[row["parameter"]] / sum(sizes.values())) ** 0.5
        assert norm == pytest.approx(min(limit, row["grad_norm"]), rel=1e-3)
        assert row["clipped"] == (row["grad_norm"] > limit)


def only_halve(train) -> None:
    found, _ = first_update(train)
    for row, norm in found:
        factor = 0.5 if row["grad_norm"] > 1 else 1
        assert norm == pytest.approx(factor * row["grad_norm"], rel=1e-3)
        assert row["clipped"] == (row["grad_norm"] > 1)


def only_gelu(train) -> None:
    mlp = rig.build_model(model.ModelConfig(n_layer=1, **SIZES)).blocks[0].mlp
    x = torch.randn(3, 5, 32)
    torch.testing.assert_close(mlp(x), mlp.down(gelu(mlp.gate(x)) * mlp.up(x)))


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
    call(copy_fork("qwen3", tmp_path / "code"), fork_exports_qwen3, tmp_path)


def fork_exports_qwen3(folder: str) -> None:
    import transformers

    from tools import hf

    source, ours, again = (f"{folder}/{name}" for name in ("source", "ours", "again"))
    torch.manual_seed(0)
    sizes = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "head_dim": 8}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.Qwen3Config(**sizes, max_position_embeddings=16)
    theirs = transformers.Qwen3ForCausalLM(config)
    for name, weight in theirs.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(weight, 1.0, 0.3)
    theirs.save_pretrained(source)
    assert hf.main(["import", source, ours]) == hf.main(["export", ours, again]) == 0
    exported = transformers.AutoModelForCausalLM.from_pretrained(again)
    assert type(exported).__name__ == "Qwen3ForCausalLM"
    tokens = torch.randint(320, (2, 16))
    logits = theirs(tokens).logits
    torch.testing.assert_close(load(ours)(tokens), logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(exported(tokens).logits, logits)


# --------------------------------------------------------------------------------------------------
# Chats


def write_chats(folder: str) -> str:
    """Write chats.jsonl into a folder, and its tokens as bytes into the folder chats."""
    import prepare_chat

    source, out = Path(folder, "chats.jsonl"), Path(folder, "chats")
    rows = []
    for a, b in itertools.product(range(20), range(20)):
        user, assistant = (f"{a} + {b}?", f"{a + b}")
        messages = [("user", user), ("assistant", assistant)]
        rows.append({"messages": [{"role": who, "content": text} for who, text in messages]})
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepare_chat.prepare(source, out, "bytes", val_fraction=0.05)
    return str(out)


# The messages of a chat | its text, with what counts in brackets and $ for the end of a text
# Q is a question, A its answer, and T a part of a text; = stands for "assistant:".
CHATS = r"""
[Q, A]                                                            | user: 2?\n=[ 4$]
[Q, {"role": "assistant", "content": [T, T]}]                     | user: 2?\n=[ 55$]
[{"role": "user", "content": [T]}, A]                             | user: 5\n=[ 4$]
[{"role": "system", "content": "Add."}, Q, A]                     | system: Add.\nuser: 2?\n=[ 4$]
[Q, A, Q]                                                         | user: 2?\n=[ 4$]user: 2?\n$
[Q, {"role": "assistant", "content": null, "tool_calls": [1]}, A] | user: 2?\n=[ 4$]
[Q, {"role": "assistant", "content": "3", "weight": 0}, A]        | user: 2?\n= 3$=[ 4$]
[Q, {"role": "assistant", "content": "\ud83d"}]                   | user: 2?\n=[ �$]
"2?"                                                              | refused
["2?"]                                                            | refused
[Q]                                                               | refused
[Q, {"role": "assistant", "content": "4", "weight": 0}]           | refused
[Q, {"role": "assistant", "content": "4", "weight": 2}, A]        | refused
[Q, {"role": "tool", "content": "4"}, A]                          | refused
[Q, {"role": "user"}, A]                                          | refused
[Q, {"role": "user", "content": 4}, A]                            | refused
[Q, {"role": "user", "content": null, "tool_calls": [1]}, A]      | refused
[Q, {"role": "assistant", "content": null, "tool_calls": []}, A]  | refused
[Q, {"role": "user", "content": []}, A]                           | refused
[Q, {"role": "user", "content": [{"type": "image_url"}, T]}, A]   | refused
"""
NAMES = {
    "Q": {"role": "user", "content": "2?"},
    "A": {"role": "assistant", "content": "4"},
    "T": {"type": "text", "text": "5"},
}


def test_chats_are_joined_or_refused_as_their_format_says(tmp_path):
    call(copy_fork("chat", tmp_path / "code"), fork_joins_chats, tmp_path)


def fork_joins_chats(folder: str) -> None:
    import prepare_chat

    file, out = Path(folder, "mine.jsonl"), Path(folder, "out")
    good = json.dumps({"messages": [NAMES["Q"], NAMES["A"]]})
    for messages, expected in cells(CHATS):
        row = re.sub(r"\b[QAT]\b", lambda name: json.dumps(NAMES[name[0]]), messages)
        # Another field, because the line decides on the split
        lines = [f'{{"n": {n}, "messages": {row}}}' for n in range(12)]
        if expected == "refused":
            lines = [good, "", f'{{"messages": {row}}}']
        file.write_text("\n".join(lines))
        argv = ["--source", file, "--out", out, "--val_fraction", 0.5]
        status, _, error = run_command(argv, prepare_chat.run_command)
        if expected == "refused":
            assert status == 2 and f"{file}, line 3: " in error and not out.exists(), messages
            continue
        assert status == 0, (messages, error)
        joined, was_counted = "", 0
        tokens = np.fromfile(out / "train.bin", "<u2").tolist()
        text = bytes(min(token, 255) for token in tokens).decode("latin-1")  # 255 ends a text
        for letter, counts in zip(text, (out / "train.mask").read_bytes()):
            joined += "["[: counts > was_counted] + "]"[: counts < was_counted]
            joined += letter
            was_counted = counts
        joined = (joined + "]" * was_counted).replace("\xff", "$").encode("latin-1").decode()
        expected = expected.replace(r"\n", "\n").replace("=", "assistant:")
        chats = joined.count(expected)
        assert chats > 1 and joined == expected * chats, (messages, joined)
        shutil.rmtree(out)


def test_a_prompt_has_the_tokens_of_training(tmp_path, tokenizers):
    """One of these tokenizers puts a space before a text, so before an answer alone, too."""
    files = []
    for kind in ("byte level", "llama 2"):
        files.append(rig.save_tokenizer(tokenizers, kind, tmp_path / f"{kind}.json"))
    call(copy_fork("chat", tmp_path / "code"), fork_encodes_a_prompt, *files)


def fork_encodes_a_prompt(*files: str) -> None:
    from prepare_chat import Message, encode_chat

    messages = [Message("user", "2 + 2?", counts=False), Message("assistant", "4", counts=True)]
    for file in files:
        encoding = tokenizer.load_encoding(file)
        ids, counts = encode_chat(encoding, messages)
        prompt = encoding.encode_ordinary("user: 2 + 2?\nassistant:")
        assert ids[: len(prompt)] == prompt and ids[-1] == encoding.eot_token, file
        assert "".join(tokenizer.decode(file, ids[:-1])) == "user: 2 + 2?\nassistant: 4", file
        assert counts == [place >= len(prompt) for place in range(len(ids))], file
