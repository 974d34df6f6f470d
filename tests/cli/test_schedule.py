# SPDX-License-Identifier: Apache-2.0
"""`moevement schedule`: the plan on the terminal and as a picture, and clear refusals."""

import json
import subprocess
import sys

import pytest

from megatron_moevement.cli import main
from megatron_moevement.policy.job.inventory_document import dump_inventory
from megatron_moevement.policy.job.model_shape import Capture, ModelShape, inventory_of
from megatron_moevement.policy.job.ranks import Layout

MODEL = [
    *("--num-layers", "4", "--hidden-size", "64", "--vocab-size", "128"),
    *("--num-experts", "8", "--moe-ffn-hidden-size", "256"),
    *("--pipeline-model-parallel-size", "2", "--expert-model-parallel-size", "2"),
]


def rows_of(text):
    """Returns the table's rows as lists of words, from the first slot on."""
    return [line.split() for line in text.splitlines() if line[:4].strip().isdigit()]


def test_a_model_by_its_sizes_gets_a_table_of_its_slots(capsys):
    assert main(["schedule", *MODEL, "--moevement-window", "3"]) == 0
    output = capsys.readouterr().out
    rows = rows_of(output)
    assert "W = 3 for 42 operators on 4 ranks" in output
    assert [row[0] for row in rows] == ["0", "1", "2"]
    assert sum(int(row[1]) for row in rows) == 32
    assert [sum(int(row[column]) for row in rows) for column in (2, 3, 4)] == [4, 4, 2]
    assert int(rows[0][5]) == 42 - sum(map(int, rows[0][1:5]))
    assert rows[-1][5] == "0"


def test_time_and_bandwidth_give_the_window_that_fits(capsys):
    limits = ["--iteration-time", "1", "--bandwidth", "0.002"]
    assert main(["schedule", *MODEL, *limits]) == 0
    output = capsys.readouterr().out
    rows = rows_of(output)
    assert len(rows) > 1
    assert "every slot fits" in output
    assert all(row[8].rstrip("%").isdigit() and int(row[8][:-1]) <= 100 for row in rows)


def test_a_slow_network_makes_the_window_longer(capsys):
    def window(*limits):
        arguments = ["schedule", *MODEL, "--iteration-time", "1", "--bandwidth", "0.004", *limits]
        assert main(arguments) == 0
        return len(rows_of(capsys.readouterr().out))

    assert window("--network-bandwidth", "0.003") > window()
    assert window("--network-bandwidth", "0.003", "--moevement-replicas", "0") == window()


def test_what_can_not_be_hidden_is_said(capsys):
    assert main(["schedule", *MODEL, "--iteration-time", "1", "--bandwidth", "1e-6"]) == 0
    assert "does NOT fit" in capsys.readouterr().out


def test_an_inventory_gives_the_same_plan_as_the_sizes_it_was_made_from(tmp_path, capsys):
    shape = ModelShape(
        4, 64, 0, 128, 8, moe_ffn_hidden_size=256, mlp_matrices=2, tied_embeddings=True
    )
    file = tmp_path / "inventory.json"
    file.write_text(dump_inventory(inventory_of(shape, Layout(pp=2, ep=2), Capture.SHARD)))
    assert main(["schedule", "--inventory", str(file), "--moevement-window", "2"]) == 0
    from_file = capsys.readouterr().out
    assert main(["schedule", *MODEL, "--moevement-window", "2"]) == 0
    assert capsys.readouterr().out == from_file


def test_popular_experts_come_late(tmp_path, capsys):
    file = tmp_path / "popularity.json"
    file.write_text(json.dumps({f"layers.{layer}.experts.0": 9 for layer in range(4)}))
    by_index = ["schedule", *MODEL, "--moevement-window", "3"]
    main(by_index)
    index = capsys.readouterr().out
    assert main([*by_index, "--moevement-order", "hard", "--popularity", str(file)]) == 0
    assert capsys.readouterr().out != index


def test_the_table_says_what_a_replay_skips_with_the_kernels_in_use(tmp_path, capsys):
    file = tmp_path / "popularity.json"
    counts = {f"layers.{n // 8}.experts.{n % 8}": 1 + 99 * (n % 8 == 0) for n in range(32)}
    file.write_text(json.dumps(counts))
    by_index = ["schedule", *MODEL, "--moevement-window", "4", "--popularity", str(file)]

    def shares(*flags):
        assert main([*by_index, *flags]) == 0
        return [int(row[8].rstrip("%")) for row in rows_of(capsys.readouterr().out)[:-1]]

    for kernels in ("each", "whole"):
        flags = ["--expert-kernels", kernels]
        index, popular = shares(*flags), shares(*flags, "--moevement-order", "hard")
        assert index == sorted(index, reverse=True)
        assert sum(popular) >= sum(index)
    assert sum(shares("--moevement-order", "hard")) > sum(shares())


def test_a_picture_is_a_png_and_replaces_an_older_one(tmp_path):
    picture = tmp_path / "slots.png"
    picture.write_bytes(b"old")
    command = [sys.executable, "-m", "megatron_moevement.cli", "schedule", *MODEL]
    done = subprocess.run(  # matplotlib keeps its fonts open until its process ends
        [*command, "--moevement-window", "2", "--picture", str(picture)],
        check=True,
        capture_output=True,
        text=True,
    )
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [file.name for file in tmp_path.iterdir()] == ["slots.png"]
    assert str(picture) in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            [],
            "give --num-layers, --hidden-size, --vocab-size, --ffn-hidden-size, or",
        ),
        (["--num-experts", "2", *MODEL[:6]], "give --moe-ffn-hidden-size, or an --inventory"),
        ([*MODEL], "give --iteration-time and --bandwidth, or --moevement-window"),
        ([*MODEL, "--world-size", "6"], "--world-size 6 must be a multiple"),
        ([*MODEL, "--num-experts", "7"], "--num-experts 7 must be a multiple of --expert-model"),
        ([*MODEL, "--moevement-window", "2", "--picture", "a.jpg"], "must end in .png"),
        ([*MODEL, "--moevement-window", "2", "--moevement-order", "hard"], "needs --popularity"),
        (["--inventory", "/none/a.json"], "can't read /none/a.json"),
        (["--inventory", __file__], "see moevement schedule --help"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, message, capsys):
    assert main(["schedule", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("flag", "value", "reason"),
    [
        ("--num-layers", "-4", "-4 is not at least 1"),
        ("--moevement-window", "0", "0 is not at least 1"),
        ("--pipeline-model-parallel-size", "0", "0 is not at least 1"),
        ("--bandwidth", "0", "0 is not above 0"),
        ("--iteration-time", "nan", "nan is not finite"),
        ("--moevement-replicas", "-1", "-1 is not 0 or more"),
    ],
)
def test_a_bad_number_is_told_with_its_flag(flag, value, reason, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["schedule", *MODEL, flag, value])
    assert ended.value.code == 2
    assert f"argument {flag}: {reason}" in capsys.readouterr().err


def test_a_wrong_name_of_a_picture_is_told_before_the_plan(capsys):
    assert main(["schedule", *MODEL, "--moevement-window", "2", "--picture", "a.svg"]) == 2
    assert not capsys.readouterr().out


@pytest.mark.parametrize("command", ["operators", "convert"])
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "give the flags of the job"),
        (["--num_layers", "4"], "did you mean --num-layers"),
    ],
)
def test_commands_that_start_a_job_check_its_flags_themselves(command, flags, message, capfd):
    assert main([command, "-n", "2", "--json", "--", *flags]) == 2
    output, error = capfd.readouterr()
    assert output == ""
    assert error.startswith(f"moevement {command}: ")
    assert message in error


def test_a_popularity_of_unknown_experts_is_refused(tmp_path, capsys):
    file = tmp_path / "popularity.json"
    file.write_text(json.dumps({"layers.9.experts.0": 1}))
    arguments = ["--moevement-window", "2", "--moevement-order", "hard", "--popularity", str(file)]
    assert main(["schedule", *MODEL, *arguments]) == 2
    assert "the model has no layers.9.experts.0" in capsys.readouterr().err


def test_a_folder_that_is_not_there_is_refused_and_nothing_is_left(tmp_path):
    picture = tmp_path / "missing" / "slots.png"
    command = [sys.executable, "-m", "megatron_moevement.cli", "schedule", *MODEL]
    done = subprocess.run(
        [*command, "--moevement-window", "2", "--picture", str(picture)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr == f"moevement schedule: --picture {picture}: No such file or directory\n"
    assert not list(tmp_path.iterdir())
