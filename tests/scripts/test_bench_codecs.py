"""`scripts/bench_codecs`, as a process of its own."""

from commands import command


def test_a_line_a_codec() -> None:
    done = command("bench_codecs", "--shape", "1,64,32", "--codec", "bfloat16", "int8", "int4")
    assert done.returncode == 0, done.stderr
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines()[3:]]
    assert [line[0] for line in lines] == ["bfloat16", "int8", "int4"]
    shares = [float(line[1]) for line in lines]
    assert 1.0 == shares[0] > shares[1] > shares[2]
    assert all(float(rate) > 0 for line in lines for rate in line[2:])
