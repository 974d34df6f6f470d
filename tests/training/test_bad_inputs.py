# SPDX-License-Identifier: Apache-2.0
"""Every bad input gets one clear line and exit code 2; nothing is written, nothing hangs."""

import json
import subprocess

import pytest
import torch

from megatron_moevement.cli import main as command
from megatron_moevement.training.arguments import build_parser
from megatron_moevement.training.checkpoints import record_file
from megatron_moevement.training.megatron_flags import FEATURES
from megatron_moevement.training.program import main
from megatron_moevement.training.refusals import resolve
from tests.harness.bad_input import only_line, refusal, run_tiny, tree
from tests.harness.log_lines import log_lines
from tests.harness.tiny_job import TINY

WORLD_SIZES = [pytest.param(1, marks=pytest.mark.slow), 2]
"""Two ranks show more than one does."""

SINGLE = {
    "--no-such-flag": "--no-such-flag",
    "stray": "unrecognized arguments: stray",
    "--enable-ft-package": "this rank is not monitored (FT_RANK_MONITOR_IPC_SOCKET is not set)",
    "--calc-ft-timeouts --save s": "the ranks are not monitored; give --enable-ft-package",
    "--calc-ft-timeouts --enable-ft-package": "keeps its limits in --save",
    "--ft-num-warmup-iters -1": "-1 is not 0 or more",
    "--num-layers two": "'two' is no integer",
    "--num-layers 0": "0 is not at least 1",
    "--lr nan": "nan is not finite",
    "--lr inf": "inf is not finite",
    "--lr -1": "-1 is not above 0",
    "--min-lr 1": "--min-lr 1.0 exceeds --lr",
    "--lr-warmup-init 1": "--lr-warmup-init 1.0 exceeds --lr",
    "--lr-warmup-iters 8": "the warm-up takes 8 of 8",
    "--lr-decay-style WSD": "--lr-wsd-decay-iters",
    "--lr-decay-style WSD --lr-wsd-decay-iters 9": "at most 8",
    "--weight-decay-incr-style linear": "--start-weight-decay",
    "--weight-decay-incr-style linear --start-weight-decay 0.2 --end-weight-decay 0.1": "exceeds",
    "--adam-beta1 1": "1 is not at least 0 and below 1",
    "--clip-grad -1": "-1 is not 0 or more",
    "--hidden-dropout 1": "1 is not at least 0 and below 1",
    "--seed -1": "-1 is not at least 0",
    "--eval-interval 0": "0 is not at least 1",
    "--exit-interval 0": "0 is not at least 1",
    "--train-iters 0": "0 is not at least 1",
    "--micro-batch-size 0": "0 is not at least 1",
    "--global-batch-size 5": "no multiple of --micro-batch-size 2",
    "--bf16 --fp16": "--bf16 and --fp16 exclude each other",
    "--loss-scale 8": "--loss-scale scales nothing in FP32",
    "--fp16 --min-loss-scale 8 --initial-loss-scale 4": "--min-loss-scale",
    "--fp16 --hysteresis 0": "0 is not at least 1",
    "--num-attention-heads 5": "--hidden-size 32 is no multiple of --num-attention-heads 5",
    "--kv-channels 3": "rope turns pairs",
    "--rotary-percent 2": "2 is not above 0 and at most 1",
    "--max-position-embeddings 8": "--seq-length 16 exceeds --max-position-embeddings 8",
    "--group-query-attention --num-query-groups 3": "--num-query-groups 3 must divide",
    "--squared-relu": "--swiglu and --squared-relu exclude each other",
    "--recompute-granularity full --recompute-num-layers 1": "needs --recompute-method",
    "--recompute-method uniform": "needs --recompute-granularity full",
    "--num-experts 1": "--moe-router-topk 2 exceeds --num-experts 1",
    "--moe-layer-freq [1]*3": "--moe-layer-freq lists 3 layers",
    "--moe-layer-freq x": "'x' is neither an integer nor a list",
    "--moe-aux-loss-coeff 0.1 0.2": "one value for each",
    "--moe-router-load-balancing-type sinkhorn": "sinkhorn has no auxiliary loss",
    "--moe-router-load-balancing-type fair": "'fair' is none of aux_loss",
    "--moe-router-num-groups 3 --moe-router-group-topk 1": "3 must divide --num-experts 4",
    "--moe-shared-expert-gate": "needs --moe-shared-expert-intermediate-size",
    "--transformer-impl transformer_engine": "TransformerEngine is not installed",
    "--moevement-backend cuda": "torch sees no CUDA device",
    "--tensor-model-parallel-size 2 --sequence-parallel": "1 ranks can't be divided",
    "--pipeline-model-parallel-size 2": "1 ranks can't be divided",
    "--expert-model-parallel-size 2": "1 ranks can't be divided into expert parallel 2",
    "--expert-tensor-parallel-size 2": "expert tensor parallel 2",
    "--num-virtual-stages-per-pipeline-rank 2": "needs --pipeline-model-parallel-size",
    "--train-samples 8": "--train-samples and --train-iters exclude each other",
    "--lr-decay-samples 8": "--lr-decay-samples needs --train-samples",
    "--lr-warmup-fraction 0.1 --lr-warmup-iters 1": "exclude each other",
    "--manual-gc-interval 2": "--manual-gc-interval needs --manual-gc",
    "--vocab-file v.json": "--vocab-file v.json: NullTokenizer is not made of it",
    "--distributed-backend mpi": "other collectives (--distributed-backend mpi)",
    "--use-mcore-models 8": "unrecognized arguments: 8",
    "--ckpt-format torch": "other checkpoint format (--ckpt-format torch)",
    "--attention-backend quick": "'quick'",
    "--overlap-param-gather": "needs --use-distributed-optimizer",
    "--save-interval 2": "--save-interval needs --save",
    "--ckpt-step 2": "--ckpt-step needs --load",
    "--finetune": "--finetune needs --load",
    "--data-path nowhere/data": "--mock-data and --data-path exclude each other",
    "--reset-position-ids": "--reset-position-ids has no effect",
    "--tokenizer-type HuggingFaceTokenizer": "--tokenizer-model",
    "--tokenizer-type HuggingFaceTokenizer --tokenizer-model nowhere": "nowhere",
    "--model-preset huge": "'huge'",
    "--wandb-project p": "--wandb-exp-name",
}
"""Flags, after those of a job that would train, and what the line must say."""

PAIR = {
    "--tensor-model-parallel-size 2": "needs --sequence-parallel",
    "--pipeline-model-parallel-size 3 --num-layers 3": "2 ranks can't be divided",
    "--tensor-model-parallel-size 2 --sequence-parallel --seq-length 15": "--seq-length 15",
    "--tensor-model-parallel-size 2 --sequence-parallel --moe-ffn-hidden-size 31": "31 is no multi",
    "--tensor-model-parallel-size 2 --sequence-parallel --num-attention-heads 1": "heads 1 is no",
    "--expert-model-parallel-size 2 --num-experts 5": "--num-experts 5 is no multiple",
    "--pipeline-model-parallel-size 2 --num-layers 3": "3 layers can't be divided evenly",
    "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 2": "can't be divided",
    "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --num-layers 4 "
    "--global-batch-size 6": "needs a multiple of 2 micro-batches",
    "--global-batch-size 6": "data-parallel size 2",
    "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ett|L|": "no multiple of",
    "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|L": "2 times t",
    "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ett|mL": "multi-token",
    "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ex|tL": "give E, t, L",
    "--no-such-flag": "--no-such-flag",
}
"""The same for two ranks."""

REFUSED_BY_MEGATRON = {
    "--moe-router-enable-expert-bias": "sigmoid",
    "--moe-pad-expert-input-to-capacity": "moe_expert_capacity_factor",
}


@pytest.fixture
def as_rank(monkeypatch, tmp_path):
    """Lets this process be a rank; the program stops before it would look for the others."""
    monkeypatch.chdir(tmp_path)

    def be(rank, world_size):
        for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", world_size)):
            monkeypatch.setenv(name, str(value))

    return be


@pytest.mark.parametrize("flags", SINGLE)
def test_one_process_refuses_bad_flags_in_one_line(flags, as_rank, capsys, tmp_path):
    as_rank(0, 1)
    before = tree(tmp_path)
    assert main([*TINY, *flags.split()]) == 2
    assert SINGLE[flags] in only_line(capsys.readouterr().err)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("flags", PAIR)
def test_two_ranks_say_once_what_both_refuse(flags, as_rank, capsys):
    for rank in range(2):
        as_rank(rank, 2)
        assert main([*TINY, *flags.split()]) == 2
    assert PAIR[flags] in only_line(capsys.readouterr().err)


def test_missing_data_is_refused_in_one_line(as_rank, capsys, tmp_path):
    as_rank(0, 1)
    flags = [flag for flag in TINY if flag != "--mock-data"]
    assert main(flags) == 2
    assert "no data" in only_line(capsys.readouterr().err)
    assert main([*flags, "--data-path", str(tmp_path / "nothing")]) == 2
    line = only_line(capsys.readouterr().err)
    assert "nothing.idx is missing" in line
    assert "moevement data prepare" in line
    assert tree(tmp_path) == {}


def test_data_of_another_tokenizer_is_refused_and_left_alone(as_rank, capsys, tmp_path):
    text, prefix = tmp_path / "text.txt", tmp_path / "data"
    text.write_text("A tokenizer of bytes made this.\n" * 50)
    prepare = ["data", "prepare", "--input", str(text), "--output-prefix", str(prefix)]
    assert command([*prepare, "--tokenizer-type", "ByteTokenizer"]) == 0
    capsys.readouterr()
    before = tree(tmp_path)
    as_rank(0, 1)
    flags = [flag for flag in TINY if flag != "--mock-data"]
    assert main([*flags, "--data-path", str(prefix)]) == 2  # the vocabulary of 96 is too small
    assert "the vocabulary of NullTokenizer ends at" in only_line(capsys.readouterr().err)
    assert tree(tmp_path) == before


REFUSED = {name: feature.flags.split()[0] for name, feature in FEATURES.items() if feature.flags}
"""By feature a flag that asks for it."""


@pytest.mark.parametrize(("feature", "flag"), REFUSED.items())
@pytest.mark.parametrize("values", [[], ["8"], ["2", "2", "8"]])
def test_a_refused_flag_says_its_feature_and_the_reason(feature, flag, values, as_rank, capsys):
    flag += "whatever" * flag.endswith("-")
    as_rank(0, 1)
    assert main([*TINY, flag, *values]) == 2
    line = only_line(capsys.readouterr().err)
    assert f"{feature} ({' '.join([flag, *values])}): {FEATURES[feature].reason}" in line


TUNING = [("multi-latent attention", "--kv-lora-rank")] + [
    (name, flag) for name, feature in FEATURES.items() for flag in feature.tuning.split()
]


@pytest.mark.parametrize(("feature", "flag"), TUNING)
@pytest.mark.parametrize("values", [[], ["8"]])
def test_what_only_tunes_a_feature_is_refused_with_it_alone(feature, flag, values):
    flag += "whatever" * flag.endswith("-")
    settings = build_parser().flags
    alone = resolve([*TINY, flag, *values], settings)
    assert (alone.refused, alone.without_effect) == ({}, (flag,))
    asking = REFUSED.get(feature) or "--optimizer muon"
    asking += "whatever" * asking.endswith("-")
    refused = resolve([*TINY, flag, *values, *asking.split()], settings).refused
    assert refused.keys() == {feature}
    assert set(refused[feature]) == {" ".join([flag, *values]), asking}


def test_all_that_is_refused_is_told_at_once(as_rank, capsys):
    as_rank(0, 1)
    flags = "--bogus --context-parallel-size 2 --spec a b --use-mcore-models --fp8-format hybrid"
    assert main([*TINY, *flags.split()]) == 2
    line = only_line(capsys.readouterr().err)
    for part in ("(--context-parallel-size 2)", "(--spec a b)", "(--fp8-format hybrid)"):
        assert part in line
    assert "unknown flags (--bogus)" in line
    assert "--use-mcore-models" not in line


@pytest.mark.distributed
def test_flags_without_an_effect_are_told_once(megatron_fork_server):
    argv = ["--train-iters=1", "--use-flash-attn", "--log-energy", "--use-mcore-models"]
    result = megatron_fork_server.run(run_tiny, world_size=2, args=[argv]).check()
    assert result.values == (0, 0)
    told = [line.text for rank in result.ranks for line in log_lines(rank.stderr)]
    line = "without an effect here: --use-flash-attn, --log-energy"
    assert [one for one in told if "effect" in one] == [line]


def test_what_is_refused_does_not_hide_what_was_mistyped(as_rank, capsys):
    as_rank(0, 1)
    assert main([*TINY, "--context-parallel-size", "2", "--num_layers", "2"]) == 2
    assert "unknown flags (--num_layers): see --help; did you mean --num-layers?" in (
        only_line(capsys.readouterr().err)
    )


@pytest.mark.parametrize("name", ["num-layers", "hidden-size", "lr", "train-iters", "seq-length"])
def test_a_flag_that_is_missing_is_named(name, as_rank, capsys):
    as_rank(0, 1)
    left = [flag for flag in TINY if not flag.startswith(f"--{name}=")]
    if name in {"num-layers", "hidden-size", "seq-length"}:  # of the preset, with others
        left = [flag for flag in left if not flag.startswith("--model-preset=")]
        left += ["--num-attention-heads=4", "--disable-bias-linear"]
    assert main(left) == 2
    assert f"--{name} " in only_line(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("rank", "world_size"), [("one", "2"), ("0", "many"), ("2", "2"), ("-1", "2"), ("0", "0")]
)
def test_a_process_that_does_not_know_its_rank_says_so(rank, world_size, as_rank, capsys):
    as_rank(rank, world_size)
    assert main(TINY) == 2
    assert "WORLD_SIZE" in only_line(capsys.readouterr().err)


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
def test_what_megatron_refuses_is_one_line(world_size, megatron_fork_server):
    for flags, words in REFUSED_BY_MEGATRON.items():
        line = refusal(megatron_fork_server, flags.split(), world_size)
        assert "Megatron-Core refuses the flags" in line
        assert words in line


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize(
    "flags",
    [
        ["--save"],
        ["--moevement-event-dir"],
        ["--tensorboard-dir"],
        ["--moevement-state-digest"],
        ["--log-progress", "--save"],
    ],
    ids=lambda flags: flags[0],
)
def test_a_place_that_cannot_be_written_is_refused(
    flags, world_size, megatron_fork_server, tmp_path
):
    file = tmp_path / "file"
    file.write_text("precious")
    line = refusal(megatron_fork_server, [*flags, str(file / "inside")], world_size)
    assert str(file) in line
    assert flags[-1] in line
    assert tree(tmp_path) == {file: b"precious"}


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--hidden-size", "64"], "--hidden-size 64 (checkpoint: 32)"),
        (["--num-experts", "8"], "--num-experts 8 (checkpoint: 4)"),
        (["--moe-router-topk", "3"], "--moe-router-topk 3 (checkpoint: 2)"),
        (["--normalization", "LayerNorm"], "--normalization LayerNorm (checkpoint: RMSNorm)"),
        (["--vocab-size", "80"], "--vocab-size"),
        (["--ckpt-step", "3"], "--ckpt-step 3"),
        (["--lr", "0.5"], "another schedule"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_a_checkpoint_that_does_not_fit_is_refused_and_left_alone(
    flags, words, world_size, saved, megatron_fork_server
):
    before = tree(saved)
    assert words in refusal(megatron_fork_server, [*flags, "--load", str(saved)], world_size)
    assert tree(saved) == before


@pytest.fixture
def earlier(saved, tmp_path):
    """The checkpoint of iteration 4, which says as little of its model as the first version did."""
    folder = tmp_path / "earlier"
    subprocess.run(["cp", "-r", str(saved), str(folder)], check=True)
    file = folder / "iter_0000004" / "common.pt"
    common = torch.load(file, weights_only=False)
    for name in ("normalization", "max_position_embeddings", "moe_router_load_balancing_type"):
        del common["moevement"]["model"][name]
    torch.save(common, file)
    manifest = folder / "moevement" / "iter_0000004.json"
    files = json.loads(manifest.read_text())["files"] | {file.name: vars(record_file(file))}
    manifest.write_text(json.dumps({"files": files}))
    return folder


@pytest.mark.distributed
def test_what_an_earlier_version_does_not_tell_of_its_model_is_found_out_by_loading(
    earlier, megatron_fork_server
):
    before = tree(earlier)
    argv = ["--normalization", "LayerNorm", "--load", str(earlier)]
    line = refusal(megatron_fork_server, argv, 2)
    assert f"{earlier / 'iter_0000004'} can't be loaded: " in line
    assert "norm_bias from model not in state dict; give the flags" in line
    assert tree(earlier) == before


@pytest.mark.slow
@pytest.mark.distributed
def test_a_checkpoint_of_an_earlier_version_goes_on(earlier, megatron_fork_server):
    argv = ["--load", str(earlier), "--exit-interval", "5", "--override-opt-param-scheduler"]
    result = megatron_fork_server.run(run_tiny, world_size=1, args=[argv]).check()
    assert result.values == (0,)
    *_, last = log_lines(result.ranks[0].stderr)
    assert last.text.startswith("ends after iteration 5 of 8")


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("flags", ["--max-position-embeddings 32", "--seq-length 32"])
def test_a_checkpoint_with_as_many_positions_as_before_is_wanted(
    flags, megatron_fork_server, tmp_path
):
    argv = ["--position-embedding-type", "learned_absolute", "--exit-interval", "1"]
    result = megatron_fork_server.run(
        run_tiny, world_size=1, args=[[*argv, "--save", str(tmp_path)]]
    ).check()
    assert result.values == (0,)
    line = refusal(megatron_fork_server, [*argv, *flags.split(), "--load", str(tmp_path)], 2)
    assert "--max-position-embeddings 32 (checkpoint: 16)" in line


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_folder_without_checkpoints_is_refused_on_demand(
    world_size, megatron_fork_server, tmp_path
):
    argv = ["--load", str(tmp_path / "none"), "--exit-on-missing-checkpoint"]
    assert "holds no checkpoint" in refusal(megatron_fork_server, argv, world_size)
    assert tree(tmp_path) == {}
