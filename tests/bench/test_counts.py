"""A count of zero is refused, and the error names the flag."""

import pytest

from mainstem_bench import batch, cpu, host, offline, serve, sessions


@pytest.mark.parametrize(
    ("parser", "flag"),
    [
        (host.parser, "--seqs"),
        (host.parser, "--groups"),
        (host.parser, "--steps"),
        (cpu.parser, "--requests"),
        (batch.parser, "--output"),
        (offline.parser, "--requests"),
        (offline.parser, "--groups"),
        (offline.parser, "--profile-steps"),
        (serve.parser, "--requests"),
        (serve.parser, "--concurrency"),
        (serve.parser, "--own"),
        (sessions.parser, "--sessions"),
        (sessions.parser, "--at-once"),
    ],
)
def test_a_count_of_zero_is_refused(
    parser: object, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert callable(parser)
    with pytest.raises(SystemExit):
        parser().parse_args([flag, "0"])
    assert f"argument {flag}: must be at least 1" in capsys.readouterr().err
