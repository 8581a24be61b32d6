"""The forks in examples/ apply to this code, compose, and do what their pages say."""

import itertools
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from old import flags, rows, torchrun
from rig import ROOT

PATCHES = sorted(ROOT.glob("examples/*.patch"))
REAL_RUNS = pytest.mark.slow(proves="what a fork trains, exports or prints")


def git(*arguments, folder: Path, check: bool = True) -> bool:
    process = subprocess.run(["git", *arguments], cwd=folder, check=check, capture_output=True)
    return process.returncode == 0


def test_every_patch_applies():
    for patch in PATCHES:
        assert git("apply", "--check", patch, folder=ROOT, check=False), patch.name


def test_any_two_forks_compose(tmp_path):
    """In either order, as docs/forking.md says: with --3way, like commits that are rebased."""
    git("init", "--quiet", folder=tmp_path)
    # The old versions that patches name, from which git merges
    objects = git_path(ROOT, "objects")
    (tmp_path / ".git/objects/info/alternates").write_text(f"{objects}\n")
    files = subprocess.check_output(["git", "ls-files", "*.py"], cwd=ROOT, text=True).split()
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / file, tmp_path / file)
    git("add", "--all", folder=tmp_path)
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    git(*author, "commit", "--quiet", "-m", "all", folder=tmp_path)
    for one, other in itertools.permutations(PATCHES, 2):
        git("apply", "--index", one, folder=tmp_path)
        composes = git("apply", "--3way", other, folder=tmp_path, check=False)
        assert composes, f"{one.stem}, {other.stem}"
        git("reset", "--quiet", "--hard", folder=tmp_path)


def git_path(folder: Path, name: str) -> Path:
    command = ["git", "rev-parse", "--git-path", name]
    return folder / subprocess.check_output(command, cwd=folder, text=True).strip()


# --------------------------------------------------------------------------------------------------
# Each fork on two ranks, in a copy of the repository


# name -> (file, kind, code), as docs/forking.md and README.md show them
SNIPPETS = {
    name: (file, kind, code)
    for kind, name, file, code in re.findall(
        r"^```(\w+)\n(?:#|@@) (\S+): (?:in|at the end of) (\S+)\n(.*?)^```",
        (ROOT / "docs/forking.md").read_text(),
        re.M | re.S,
    )
}
(HALVE,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
SNIPPETS["halve"] = ("optim.py", "python", HALVE)


def insert(name: str, code: Path) -> None:
    """Put a snippet at the end of its file, or in place of the lines that it removes."""
    file, kind, text = SNIPPETS[name]
    source = (code / file).read_text()
    if kind == "diff":
        old, new = ("\n".join(re.findall(rf"^\{sign}(.*)", text, re.M)) for sign in "-+")
        assert source.count(old) == 1
        source = source.replace(old, new)
    else:
        source += f"\n\n{text}"
    (code / file).write_text(source)


@pytest.mark.parametrize("name", SNIPPETS)
def test_a_snippet_fits_into_its_file(name, tmp_path):
    file, _, _ = SNIPPETS[name]
    shutil.copy(ROOT / file, tmp_path)
    insert(name, tmp_path)
    compile((tmp_path / file).read_text(), file, "exec")


class Fork:
    def __init__(self, name: str, folder: Path, tokens: Path):
        self.folder, self.tokens = folder, tokens
        self.code = folder / "code"
        unwanted = shutil.ignore_patterns(".git", "runs", "tokens", "tests", "__pycache__")
        shutil.copytree(ROOT, self.code, ignore=unwanted)
        if name in SNIPPETS:
            insert(name, self.code)
        else:
            git("apply", ROOT / f"examples/{name}.patch", folder=self.code)
        if name == "chat":
            self.tokens = self.prepare_chats()

    def prepare_chats(self, *options) -> Path:
        chats, out = self.folder / "chats.jsonl", self.folder / f"chats{len(options)}"
        answers = [(a, b) for a in range(20) for b in range(20)]
        rows = [[("user", f"{a} + {b}?"), ("assistant", f"{a + b}")] for a, b in answers]
        messages = [[{"role": who, "content": text} for who, text in row] for row in rows]
        chats.write_text("".join(json.dumps({"messages": row}) + "\n" for row in messages))
        self.python("prepare_chat.py", "--source", chats, "--out", out, *options)
        return out

    def train(self, ranks: int, text: str, name: str) -> Path:
        out = self.folder / name
        argv = flags(f"--data {self.tokens} --out {out} --dtype float32 {text}")
        script = self.code / "train.py"
        job = torchrun(ranks, argv, self.folder / f"{name}-job", script=script)
        assert job.wait(300) == 0, job.err
        return out

    def refused(self, *command) -> tuple[int, str]:
        """Run a command that fails; return its status, and its one line."""
        command = [sys.executable, *map(str, command)]
        process = subprocess.run(command, cwd=self.code, capture_output=True, text=True)
        assert process.stderr.count("\n") == 1, process.stderr
        return process.returncode, process.stderr

    def python(self, *command) -> str:
        """Run a command or a piece of code; return what it prints."""
        command = [sys.executable, *map(str, command)]
        return subprocess.run(
            command, cwd=self.code, check=True, capture_output=True, text=True
        ).stdout


@pytest.fixture
def fork(request, tmp_path, tokens) -> Fork:
    """The fork or snippet whose name follows the two underscores in the name of the test."""
    name = request.node.name.rpartition("__")[2].replace("_", "-")
    return Fork(name, tmp_path, tokens)


def assert_same_losses(one: Path, other: Path) -> None:
    for key in ("loss", "val_loss"):
        a, b = ([row[key] for row in rows(run, key)] for run in (one, other))
        assert a == pytest.approx(b, rel=1e-5)


def train_alike(fork: Fork, options: str, *meshes: str) -> list[Path]:
    """Train on one rank and on each mesh of two; check that the losses agree. Return the runs."""
    runs = [fork.train(1, f"{options} --strategy single", "single")]
    for mesh in meshes:
        runs.append(fork.train(2, f"{options} {mesh}", mesh.split()[-1]))
        assert_same_losses(runs[0], runs[-1])
    return runs


TRAINED = {
    "z-loss": "--z_loss 0.01",
    "qwen3": "--qk_norm",
    "document-mask": "--end_of_text 256",
    "diloco": "--optimizer diloco --eval_interval 20 --save_interval 20",
    "chat": "",
    "wsd-sqrt": "--schedule wsd-sqrt",
    "share": "--clip share --max_grad_norm 0.1",
    "halve": "--clip halve",
    "window": "--seq_len 32",
    "gelu": "",
}
MESHES = {"--strategy ddp": 2, "--strategy fsdp": 2, "--strategy hsdp --dp_shard 2": 4}


def test_all_forks_are_trained_on_every_mesh():
    assert {*TRAINED} == {patch.stem for patch in PATCHES} | {*SNIPPETS}


@REAL_RUNS
@pytest.mark.parametrize("name", TRAINED)
def test_20_steps_are_those_of_one_rank(name, tmp_path, tokens):
    fork = Fork(name, tmp_path, tokens)
    options = f"--max_steps 20 {TRAINED[name]}"
    single = fork.train(1, f"{options} --strategy single", "single")
    for mesh, ranks in MESHES.items():
        if name == "diloco" and mesh != "--strategy fsdp":
            continue  # there several replicas train alone
        assert_same_losses(single, fork.train(ranks, f"{options} {mesh}", mesh.split()[1]))


@REAL_RUNS
def test_each_gradient_is_clipped_to_its_share__share(fork):
    options = "--max_steps 6 --clip share --max_grad_norm 0.1 --optim_metrics_interval 1"
    single, sharded = train_alike(fork, options, "--strategy fsdp")
    lines = [json.loads(line) for line in (sharded / "optim.jsonl").read_text().splitlines()]
    statistics = [row for row in lines if "parameter" in row]  # not the start's
    assert {row["clipped"] for row in statistics} <= {0, 1}
    first = {row["parameter"]: row for row in statistics if row["step"] == 1}
    parameters = 320 * 32 + 32 + 2 * (2 * 32 + 3 * 32 * 32 + 3 * 32 * 64)
    # With beta1 0.9, the moment after one step is a tenth of the clipped gradient.
    norm = first["embed.weight"]["exp_avg_norm"]
    assert first["embed.weight"]["clipped"] == 1
    assert norm == pytest.approx(0.1 * 0.1 * (320 * 32 / parameters) ** 0.5, rel=1e-3)


@REAL_RUNS
def test_the_learning_rate_decays_as_a_root__wsd_sqrt(fork):
    run = fork.train(2, "--max_steps 11 --schedule wsd-sqrt --strategy ddp", "run")
    rates = [row["lr"] / 3e-3 for row in rows(run)]
    assert rates == pytest.approx([1] * 10 + [1 - 0.5**0.5])


@REAL_RUNS
def test_z_loss_is_added_in_training_only__z_loss(fork):
    plain = fork.train(1, "--max_steps 1 --lr 0", "plain")
    single, sharded, split = train_alike(
        fork, "--max_steps 1 --lr 0 --z_loss 0.01", "--strategy fsdp", "--tp 2"
    )
    chunked = fork.train(1, "--max_steps 1 --lr 0 --z_loss 0.01 --loss_chunks 4", "chunked")
    for run in (single, sharded, split, chunked):
        val_losses = [rows(one, "val_loss")[0]["val_loss"] for one in (run, plain)]
        assert val_losses[0] == pytest.approx(val_losses[1], rel=1e-6)
        # At the start all 320 logits are close to 0.
        added = rows(run)[0]["loss"] - rows(plain)[0]["loss"]
        assert added == pytest.approx(0.01 * math.log(320) ** 2, rel=0.01)


DOCUMENTS = """
import torch, model
config = model.ModelConfig(320, n_layer=2, n_head=4, n_kv_head=2, d_model=32, d_ff=64, seq_len=24,
                           end_of_text=256)
net = model.Transformer(config)
for name, weight in net.named_parameters():
    net.init_tensor(name, weight, 0)

def sums(texts):
    net.zero_grad()
    losses = [net(text[:, :-1], text[:, 1:]) * (text.size(1) - 1) for text in texts]
    sum(losses).backward()
    return sum(losses).item(), [weight.grad.clone() for weight in net.parameters()]

packed = torch.randint(256, (2, 25), generator=torch.Generator().manual_seed(0))
packed[:, [6, 17]] = 256  # the last document goes on
torch.testing.assert_close(
    sums([packed]), sums([packed[:, :7], packed[:, 7:18], packed[:, 18:]]), rtol=1e-4, atol=1e-5)
"""


@REAL_RUNS
def test_packed_documents_are_independent__document_mask(fork):
    fork.python("-c", DOCUMENTS)
    train_alike(fork, "--max_steps 4 --end_of_text 256", "--strategy fsdp", "--tp 2")


QWEN3 = """
import sys, torch, transformers
torch.manual_seed(0)
config = transformers.Qwen3Config(
    vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=16,
    tie_word_embeddings=False)
hf_model = transformers.Qwen3ForCausalLM(config).eval()
for name, weight in hf_model.named_parameters():
    if "norm" in name:
        torch.nn.init.normal_(weight, 1.0, 0.3)
hf_model.save_pretrained(sys.argv[1] + "/qwen3")
from pathlib import Path
from tools import hf
import sample
assert hf.main(["import", sys.argv[1] + "/qwen3", sys.argv[1] + "/ours"]) == 0
path = Path(sys.argv[1] + "/ours")
ours = sample.load_model(path, sample.read_trained(path).config, torch.device("cpu"))
tokens = torch.randint(320, (2, 16))
with torch.no_grad():
    torch.testing.assert_close(ours(tokens), hf_model(tokens).logits, rtol=1e-4, atol=1e-4)
assert hf.main(["export", sys.argv[1] + "/ours", sys.argv[1] + "/again"]) == 0
again = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1] + "/again")
assert type(again).__name__ == "Qwen3ForCausalLM"
with torch.no_grad():
    torch.testing.assert_close(again(tokens).logits, hf_model(tokens).logits)
"""


@REAL_RUNS
def test_qwen3_trains_on_every_mesh__qwen3(fork):
    train_alike(fork, "--max_steps 4 --qk_norm true", "--strategy fsdp", "--tp 2")


@pytest.mark.hf
def test_logits_are_those_of_transformers__qwen3(fork):
    pytest.importorskip("transformers")
    fork.python("-c", QWEN3, fork.folder)


@REAL_RUNS
def test_replicas_synchronise_every_20th_update__diloco(fork):
    options = "--optimizer diloco --strategy hsdp --eval_interval 20 --save_interval 20"
    met = []
    for last in (19, 20):  # the step after the window is the one whose collectives are counted
        text = f"{options} --dp_shard 2 --max_steps 40 --profile 18:{last}"
        run = fork.train(4, text, f"until-{last}")
        found = json.loads((run / "profile/rank_0.json").read_text())["communicated"]
        met.append({row["kind"]: row["bytes"] for row in found if row["axis"] == "dp_replicate"})
    parameters = 320 * 32 + 32 + 2 * (2 * 32 + 3 * 32 * 32 + 3 * 32 * 64)
    assert met == [{"all_reduce": 4 * parameters // 2}, {}]  # each of two shards
    # A run continues on another mesh, from an outer update.
    more = fork.train(2, f"{options} --max_steps 60 --dp_shard 1", run.name)
    assert [row["step"] for row in rows(more, "val_loss")] == [20, 40, 60]


CHAT = """
import torch, model
config = model.ModelConfig(320, n_layer=2, n_head=4, n_kv_head=2, d_model=32, d_ff=64, seq_len=16)
net = model.Transformer(config)
for name, weight in net.named_parameters():
    net.init_tensor(name, weight, 0)
tokens = torch.randint(320, (3, 17), generator=torch.Generator().manual_seed(0))
counts = torch.rand(3, 17, generator=torch.Generator().manual_seed(1)) < 0.3
x = []  # what the head sees
def keep(module, inputs, y):
    y.retain_grad()
    x.append(y)
net.norm.register_forward_hook(keep)
marked = torch.where(counts, tokens, ~tokens)
loss = net(marked[:, :-1], marked[:, 1:])
loss.backward()
answers = counts[:, 1:]
assert (x[0].grad[~answers] == 0).all() and (x[0].grad[answers] != 0).any(-1).all()
found = [weight.grad.clone() for weight in net.parameters()]
net.zero_grad()
logits = net(tokens[:, :-1])[answers]
expected = torch.nn.functional.cross_entropy(logits, tokens[:, 1:][answers], reduction="sum") / 48
expected.backward()
torch.testing.assert_close(loss, expected)
torch.testing.assert_close(found, [weight.grad for weight in net.parameters()])
"""


@REAL_RUNS
def test_only_answers_have_a_gradient__chat(fork):
    fork.python("-c", CHAT)
    mask = (fork.tokens / "train.mask").read_bytes()
    tokens = (fork.tokens / "train.bin").read_bytes()
    answers = "".join(chr(token) for token, counts in zip(tokens[::2], mask) if counts)
    assert set(answers) <= set(" 0123456789\0")  # 256, the end of a text, has a low byte of 0
    assert mask.count(1) == len(answers) > 1000 and 0 in mask
    (fork.tokens / "train.mask").write_bytes(bytes(len(mask)))  # no answer at all
    for ranks in (1, 4):
        run = fork.train(ranks, "--max_steps 3 --optim_metrics_interval 1", f"{ranks}-ranks")
        assert [(row["loss"], row["grad_norm"], row["answers"]) for row in rows(run)] == [
            (0, 0, 0)
        ] * 3


MEAN = """
import json, sys, numpy as np, torch
from pathlib import Path
import data, sample
tokens, run, split, steps = sys.argv[1:]
path = sample.newest_checkpoint(Path(run))
model = sample.load_model(path, sample.read_trained(path).config, torch.device("cpu"))
ids = np.fromfile(f"{tokens}/{split}.bin", "<u2").astype(np.int64)
mask = np.fromfile(f"{tokens}/{split}.mask", np.bool_)
T = model.config.seq_len
windows = range((len(ids) - 1) // T)
if split == "train":
    windows = [data.window_of(n, len(windows), 0) for n in range(8)]
losses = []
for window in list(windows)[: int(steps)]:
    text = torch.from_numpy(ids[window * T : window * T + T + 1])
    counts = torch.from_numpy(mask[window * T + 1 : window * T + T + 1])
    logits = model(text[None, :-1])[0][counts]
    losses += torch.nn.functional.cross_entropy(logits, text[1:][counts], reduction="none").tolist()
print(sum(losses) / len(losses))
"""


@REAL_RUNS
def test_a_loss_is_the_mean_over_the_tokens_that_count__chat(fork):
    """In training, those of all micro-batches and ranks; in an evaluation, of all sequences."""
    text = "--global_batch_size 8 --micro_batch_size 2 --max_steps 1 --lr 0 --eval_sequences 1000"
    for ranks in (1, 2):
        run = fork.train(ranks, text, f"{ranks}-ranks")
        found = [rows(run, name)[0][name] for name in ("loss", "val_loss")]
        for value, split, count in zip(found, ("train", "val"), (8, 10**6)):
            expected = float(fork.python("-c", MEAN, fork.tokens, run, split, count))
            assert value == pytest.approx(expected, rel=1e-5), split
    evaluation = ("train.py", "--eval_only", "--device", "cpu", "--dtype", "float32", "--out", run)
    said = fork.python(*evaluation, "--data", fork.tokens, "--eval_sequences", "1000")
    assert float(said.split()[-1]) == pytest.approx(found[1], rel=1e-5)
    assert "%" in fork.python("-m", "tools.replay", run, "1")
    (fork.tokens / "val.mask").write_bytes(bytes((fork.tokens / "val.mask").stat().st_size))
    status, line = fork.refused(*evaluation, "--data", fork.tokens)
    assert status == 2 and "counts" in line


def made(role: str, content: object, **fields) -> dict:
    return {"role": role, "content": content} | fields


USER, ANSWER = made("user", "2?"), made("assistant", "4")
CALL = made("assistant", None, tool_calls=[{"type": "function"}])
PARTS = [{"type": "text", "text": "4"}, {"type": "text", "text": "2"}]
# messages -> the text of its tokens, where those that count are in brackets, and $ ends a text
CHATS = [
    ([USER, ANSWER], "user: 2?\nassistant:[ 4$]"),
    ([USER, made("assistant", PARTS)], "user: 2?\nassistant:[ 42$]"),
    ([made("user", PARTS), ANSWER], "user: 42\nassistant:[ 4$]"),
    ([made("system", "Add."), USER, ANSWER], "system: Add.\nuser: 2?\nassistant:[ 4$]"),
    ([USER, ANSWER, USER], "user: 2?\nassistant:[ 4$]user: 2?\n$"),
    ([USER, CALL, ANSWER], "user: 2?\nassistant:[ 4$]"),
    ([USER, made("assistant", "", tool_calls=[{}]), ANSWER], "user: 2?\nassistant:[ 4$]"),
    (
        [USER, ANSWER | {"weight": 0}, USER, ANSWER],
        "user: 2?\nassistant: 4$user: 2?\nassistant:[ 4$]",
    ),
    ([USER, made("assistant", "\ud83d")], "user: 2?\nassistant:[ \ufffd$]"),
]
NO_CHATS = [
    [],
    7,
    "text",
    {"text": "2?"},
    {"messages": None},
    {"messages": "2?"},
    {"messages": {"role": "user", "content": "2?"}},
    {"messages": []},
    {"messages": ["2?"]},
    {"messages": [USER]},
    {"messages": [USER, CALL]},
    {"messages": [USER, ANSWER | {"weight": 0}]},
    {"conversations": [{"from": "human", "value": "2?"}, {"from": "gpt", "value": "4"}]},
    *(
        {"messages": [USER, message, ANSWER]}
        for message in [
            made("model", "4"),
            made("tool", "4"),
            made("Assistant", "4"),
            made(None, "4"),
            {"content": "4"},
            {"role": "user"},
            {"role": "assistant"},
            made("assistant", None),
            made("assistant", None, tool_calls=[]),
            made("user", None, tool_calls=[{}]),
            made("user", 4),
            made("user", True),
            made("user", {"type": "text", "text": "4"}),
            made("user", []),
            made("user", ["4"]),
            made("user", [{"type": "text"}]),
            made("user", [{"type": "text", "text": None}]),
            made("user", [{"type": "image_url", "image_url": "x"}, *PARTS]),
            made("assistant", [{"type": "refusal", "refusal": "No."}]),
            made("assistant", "4", weight="1"),
        ]
    ),
]


PREPARE = """
import contextlib, io, json, shutil, sys
from pathlib import Path
import errors, prepare_chat
folder = Path(sys.argv[1])
found = []
for lines in json.loads((folder / "cases.json").read_text()):
    (folder / "mine.jsonl").write_text("\\n".join(lines))
    argv = f"--source {folder}/mine.jsonl --out {folder}/out --val_fraction 0.5".split()
    with contextlib.redirect_stderr(io.StringIO()) as error:
        status = errors.execute("prepare_chat.py", prepare_chat.run_command, argv)
    files = {file.name: [*file.read_bytes()] for file in folder.glob("out/train.*")}
    found.append([status, error.getvalue(), files])
    shutil.rmtree(folder / "out", ignore_errors=True)
(folder / "found.json").write_text(json.dumps(found))
"""


def prepare_each(fork: Fork, cases: list[list[dict]]) -> list:
    """Prepare the rows of each case; return the statuses, lines of errors and files of train."""
    lines = [[json.dumps(row) if row is not BLANK else "" for row in rows] for rows in cases]
    (fork.folder / "cases.json").write_text(json.dumps(lines))
    fork.python("-c", PREPARE, fork.folder)
    return json.loads((fork.folder / "found.json").read_text())


BLANK = object()


def test_chats_are_joined_as_their_format_says__chat(fork):
    # Another field, because the line decides on the split
    cases = [[{"messages": messages, "n": n} for n in range(12)] for messages, _ in CHATS]
    for (messages, expected), (status, _, files) in zip(CHATS, prepare_each(fork, cases)):
        assert status == 0, messages
        text = [*zip(files["train.bin"][::2], files["train.bin"][1::2])]
        joined, was_counted = b"", 0
        for (low, high), counts in zip(text, files["train.mask"]):
            joined += b"["[: counts > was_counted] + b"]"[: counts < was_counted]
            joined += b"$" if high else bytes([low])  # 256 ends a text
            was_counted = counts
        joined = (joined + b"]"[:was_counted]).decode()
        chats = joined.count(expected)
        assert chats and joined == expected * chats, messages


def test_a_row_that_is_no_chat_is_refused__chat(fork):
    right = {"messages": [USER, ANSWER]}
    cases = [[right, BLANK, row] for row in NO_CHATS]
    for row, (status, line, files) in zip(NO_CHATS, prepare_each(fork, cases)):
        assert status == 2 and not files, row
        assert f"{fork.folder}/mine.jsonl, line 3: " in line and line.count("\n") == 1, row


PAGE = re.search(r"^## chat\n\n((?:    .*\n)+)", (ROOT / "docs/forking.md").read_text(), re.M)


def save_llama(transformers, tokenizers, kind: str, folder: Path) -> str:
    """Save a random Llama with a tokenizer of a kind; return the name of its end of a text."""
    models, pre, trainers = tokenizers.models, tokenizers.pre_tokenizers, tokenizers.trainers
    text = "".join(f"user: {a} + {b}?\nassistant: {a + b}\n" for a in range(20) for b in range(20))
    if kind == "byte level":
        end, special = "<|im_end|>", ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
        made = tokenizers.Tokenizer(models.BPE())
        made.pre_tokenizer = pre.ByteLevel(add_prefix_space=False)
        made.decoder = tokenizers.decoders.ByteLevel()
        options = {"initial_alphabet": pre.ByteLevel.alphabet()}
    else:
        end, special = "</s>", ["<unk>", "<s>", "</s>"]
        made = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        made.pre_tokenizer = pre.Metaspace(prepend_scheme="always")
        made.decoder = tokenizers.decoders.Metaspace()
        options = {}
        special += [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=special, show_progress=False, **options
    )
    made.train_from_iterator([text], trainer)
    spec = json.loads(made.to_str())
    spec["added_tokens"] = spec["added_tokens"][:3]
    spec["added_tokens"][2]["special"] = False  # as in some models
    made = tokenizers.Tokenizer.from_str(json.dumps(spec))
    names = {"eos_token": end, "bos_token": special[1], "pad_token": special[0]}
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names).save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=made.get_vocab_size(),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return end


@REAL_RUNS
@pytest.mark.parametrize("kind", ["byte level", "metaspace"])
def test_the_commands_of_the_page_make_a_model_that_stops__chat(kind, tmp_path, tokens, tokenizers):
    transformers = pytest.importorskip("transformers")
    fork = Fork("chat", tmp_path, tokens)
    shutil.move(tmp_path / "chats.jsonl", fork.code)
    end = save_llama(transformers, tokenizers, kind, fork.code / "SmolLM2-135M")
    more = {
        "train.py": "--lr 1e-2 --max_steps 120 --seq_len 16 --device cpu --dtype float32 "
        "--global_batch_size 16 --sample_tokens 8 --eval_interval 60",
        "sample.py": "--temperature 0 --max_new_tokens 8 --device cpu",
    }
    said = {}
    for line in PAGE[1].splitlines():
        _, name, *_ = line.split()
        command = f"{line.strip().replace('python', sys.executable, 1)} {more.get(name, '')}"
        process = subprocess.run(
            ["bash", "-c", command], cwd=fork.code, capture_output=True, text=True
        )
        assert process.returncode == 0, (line, process.stderr)
        said[name] = process.stdout
    question, answer = said["sample.py"].strip().splitlines()
    assert question == "user: 2 + 2?" and re.fullmatch(r"assistant: \d+", answer), said["sample.py"]
    folder = fork.code / "chat"
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = theirs(f"{question}\nassistant:", return_tensors="pt", add_special_tokens=False)
    written = model.generate(**ids, max_new_tokens=8, do_sample=False)[0].tolist()
    assert written[-1] == theirs.convert_tokens_to_ids(end) == model.generation_config.eos_token_id
    assert theirs.decode(written[:-1]).strip() == f"{question}\n{answer}"
    # The tokens of the prompt are those of training.
    stored = (fork.code / "tokens/chats/train.bin").read_bytes()
    prompt = [token for id in ids["input_ids"][0].tolist() for token in id.to_bytes(2, "little")]
    assert bytes(prompt[-8:]) in stored
    assert model.config.max_position_embeddings == 64
    fork.python("-m", "tools.compare", "runs/chat", "runs/chat")
