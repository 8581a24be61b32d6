"""How every command ends. What argparse finds is tried by test_mistakes.py."""

from unittest import mock

import pytest

from runtime import cli

NO_MEMORY = "lower --micro_batch_size, or shard with --strategy fsdp\n"


@pytest.mark.parametrize(
    "error, status, said",
    [
        (cli.UsageError("--lr is too high"), 2, "prog: error: --lr is too high\n"),
        (cli.RunError("no memory is left"), 1, "prog: error: no memory is left\n"),
        (OSError(28, "No space left"), 1, "prog: error: [Errno 28] No space left\n"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory."),
            1,
            f"prog: error: can't allocate memory; {NO_MEMORY}",
        ),
        (MemoryError(), 1, f"prog: error: out of memory; {NO_MEMORY}"),
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(), 130, ""),  # the reader of a pipe has left
    ],
)
def test_an_error_that_a_person_can_mend_is_a_line_and_a_status(capsys, error, status, said):
    assert cli.execute("prog", mock.Mock(side_effect=error)) == status
    assert capsys.readouterr() == ("", said)


def test_a_command_returns_its_status_and_its_faults_pass():
    assert [cli.execute("prog", mock.Mock(return_value=result)) for result in (None, 75)] == [0, 75]
    with pytest.raises(ZeroDivisionError):
        cli.execute("prog", lambda: 1 // 0)
