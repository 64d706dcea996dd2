"""Texts on which a whitespace rule has no advantage."""

from typer.testing import CliRunner

from research.texts import app


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_only_whitespace_is_removed(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "train.txt").write_bytes("Ein  Köder,\n\tzwei\r\n".encode())
    assert run("without-spaces", tmp_path / "text", "--out", tmp_path / "joined").exit_code == 0
    assert (tmp_path / "joined" / "train.txt").read_bytes() == "EinKöder,zwei".encode()
    for folder, out in ((tmp_path / "text", tmp_path / "joined"), (tmp_path / "none", tmp_path / "new")):
        assert run("without-spaces", folder, "--out", out).exit_code != 0
    assert not (tmp_path / "new").exists()


def test_every_source_file_is_in_exactly_one_split(tmp_path):
    texts = [f"x = {number}\n" for number in range(400)]
    (tmp_path / "package").mkdir()
    for number, text in enumerate([*texts, texts[0]]):
        (tmp_path / "package" / f"m{number}.py").write_text(text)
    assert run("source-code", tmp_path / "package", "--out", tmp_path / "code").exit_code == 0
    found = [(tmp_path / "code" / f"{split}.txt").read_text() for split in ("train", "valid", "test")]
    assert sorted("".join(found).split("\n\n\n")[:-1]) == sorted(text.strip() for text in texts)
    assert len(found[0]) > 9 * len(found[1] + found[2]) > 0
    assert run("source-code", tmp_path / "code", "--out", tmp_path / "no").exit_code != 0
