"""Write patches whose context is whole functions: the forks, and the bugs of the lecture.

    python examples/patches.py          those that no longer apply, merged with the last commit
    python examples/patches.py NAME     the changes of the working tree, as examples/NAME.patch

Git applies a patch wherever it finds the context. Here the context of a change is the function, or
another statement of a module or class, that it is in. So a patch applies as long as nobody has
changed these, whatever happens around them. If somebody has, the first command merges both changes,
as `git apply --3way` does, and names the patches with which it cannot.
"""

import argparse
import ast
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RAW = argparse.RawDescriptionHelpFormatter
PATCHES = [*sorted(ROOT.glob("examples/*.patch")), *sorted(ROOT.glob("docs/bugs/*.patch"))]


def git(*arguments, folder: Path = ROOT) -> str:
    return subprocess.run(
        ["git", *map(str, arguments)], cwd=folder, check=True, capture_output=True, text=True
    ).stdout


# A change replaces the lines start ... stop of the old file, counted from 0, by `new`.
Change = tuple[int, int, list[str]]


def changes_of(folder: Path, file: str) -> Iterator[Change]:
    """Yield the changes of a file since the last commit, from top to bottom."""
    for hunk in git("diff", "-U0", "HEAD", "--", file, folder=folder).split("\n@@ -")[1:]:
        header, *lines = hunk.splitlines()
        first, _, count = header.split()[0].partition(",")
        count = int(count or 1)
        start = int(first) - (count > 0)  # of an insertion, git gives the line before it
        yield start, start + count, [line[1:] for line in lines if line.startswith("+")]


def statements_of(source: str) -> list[tuple[int, int]]:
    """Return the lines (start, stop) of each function and other statement, with its comments.

    A class is one statement for its first lines, and one for each statement of its body.
    """
    lines = source.splitlines()
    found = []

    def add(nodes: list[ast.stmt]) -> None:
        for node in nodes:
            decorators = getattr(node, "decorator_list", [])
            start = min([node.lineno, *(decorator.lineno for decorator in decorators)]) - 1
            while start and re.match(r"\s*#(?! -)", lines[start - 1]):
                start -= 1
            if isinstance(node, ast.ClassDef):
                found.append((start, node.body[0].lineno - 1))
                add(node.body)
            else:
                found.append((start, node.end_lineno))

    add(ast.parse(source).body)
    return found


def hunks_of(source: str, changes: list[Change]) -> Iterator[tuple[int, int, list[Change]]]:
    """Yield the old lines (start, stop) of each hunk, with its changes."""
    lines = source.splitlines()
    statements = statements_of(source)
    pending = None
    for change in changes:
        start, stop = context_of(change, statements)
        # Without a line after the last change, git would look for it at the end of the file.
        stop = min(stop + (stop == change[1]), len(lines))
        if pending and start <= pending[1]:
            pending = pending[0], max(stop, pending[1]), [*pending[2], change]
            continue
        if pending:
            yield pending
        pending = start, stop, [change]
    if pending:
        yield pending


def context_of(change: Change, statements: list[tuple[int, int]]) -> tuple[int, int]:
    """Return the lines of the statements in which a change is, or next to which it inserts."""
    first, last, _ = change
    inside = [(a, b) for a, b in statements if (a < last and first < b) or a < first == last < b]
    if not inside:  # an insertion between two: after a line of its own, or before what follows
        before = [(a, b) for a, b in statements if b == first]
        after = [(a, b) for a, b in statements if a >= first]
        inside = before or after[:1] or statements[-1:]
    return min([first, *(a for a, _ in inside)]), max([last, *(b for _, b in inside)])


def unified(file: str, source: str, changes: list[Change]) -> str:
    """Return the hunks of a file as `git apply` reads them."""
    old = source.splitlines()
    text = ""
    shift = 0  # lines that earlier hunks have added
    for start, stop, changed in hunks_of(source, changes):
        if source.count("\n".join(old[start:stop])) > 1:
            raise ValueError(f"{file}: the context of line {start + 1} occurs twice")
        body, position, added = [], start, 0
        for first, last, new in changed:
            body += [" " + line for line in old[position:first]]
            body += ["-" + line for line in old[first:last]] + ["+" + line for line in new]
            added += len(new) - (last - first)
            position = last
        body += [" " + line for line in old[position:stop]]
        count = stop - start
        text += f"@@ -{start + 1},{count} +{start + 1 + shift},{count + added} @@\n"
        text += "\n".join(body) + "\n"
        shift += added
    return text


def patch_of(folder: Path) -> str:
    """Return the changes since the last commit, with whole statements as context."""
    git("add", "--intent-to-add", "--all", folder=folder)  # so that new files are seen
    text = ""
    for part in re.split(r"^(?=diff --git)", git("diff", "HEAD", folder=folder), flags=re.M)[1:]:
        header = part[: part.index("\n@@")] + "\n"
        file = re.search(r"^\+\+\+ b/(.+)", header, re.M)[1]
        if "new file" in header or not file.endswith(".py"):
            text += part
            continue
        source = git("show", f"HEAD:{file}", folder=folder)
        text += header + unified(file, source, [*changes_of(folder, file)])
    return text


def merge(patches: list[Path]) -> list[str]:
    """Write the patches that no longer apply; return the names of those that cannot be merged."""
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        git("worktree", "add", "--detach", copy, "HEAD")
        try:
            for path in patches:
                if applies(path, copy, "--check"):
                    continue
                if applies(path, copy, "--3way"):
                    path.write_text(patch_of(copy))
                else:
                    failed.append(path.name)
                git("reset", "--hard", folder=copy)
                git("clean", "--force", "-d", folder=copy)
        finally:
            git("worktree", "remove", "--force", copy)
    return failed


def applies(patch: Path, folder: Path, option: str) -> bool:
    command = ["git", "apply", option, patch]
    return subprocess.run(command, cwd=folder, capture_output=True).returncode == 0


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=RAW)
    parser.add_argument("name", nargs="?", metavar="NAME")
    name = parser.parse_args(argv).name
    if name:
        text = patch_of(ROOT)
        git("reset")
        (ROOT / f"examples/{name}.patch").write_text(text)
        return 0
    failed = merge(PATCHES)
    for name in failed:
        print(f"{name}: its lines have changed; apply it by hand, and write it again")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
