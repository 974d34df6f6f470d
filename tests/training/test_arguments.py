# SPDX-License-Identifier: Apache-2.0
"""The flags of the program: a frozen list, each of them read, presets as defaults only."""

import argparse
import ast
import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

import megatron_moevement
from megatron_moevement.errors import UserError
from megatron_moevement.integrations.megatron.config_fields import config_fields
from megatron_moevement.integrations.megatron.transformer_options import (
    COVERED,
    TransformerOptions,
)
from megatron_moevement.settings.architecture import Architecture, MixtureOfExperts
from megatron_moevement.settings.checkpointing import Checkpointing
from megatron_moevement.settings.fault_injection import FaultInjection
from megatron_moevement.settings.fault_tolerance import FaultTolerance
from megatron_moevement.settings.flags import flag_name
from megatron_moevement.settings.optimization import Optimization
from megatron_moevement.settings.parallelism import Parallelism
from megatron_moevement.settings.precision import Precision
from megatron_moevement.settings.profiling import ProfilingConfig
from megatron_moevement.settings.rank_monitor import RankMonitoring
from megatron_moevement.settings.restart import InProcessRestart
from megatron_moevement.settings.run import Run
from megatron_moevement.training.arguments import build_parser, parse
from megatron_moevement.training.data.arguments import DataFlags
from megatron_moevement.training.megatron_flags import (
    ALIASES,
    AS_IT_IS,
    FEATURES,
    WITHOUT_EFFECT,
)
from megatron_moevement.training.presets import PRESETS
from megatron_moevement.training.refusals import answer, resolve
from megatron_moevement.training.reporting.arguments import LoggingConfig
from tests.harness.tiny_job import PLAIN, tiny_arguments

FROZEN = Path(__file__).with_name("flags.txt")
PACKAGE = Path(megatron_moevement.__file__).parent
GROUPS = (
    Architecture,
    MixtureOfExperts,
    TransformerOptions,
    Parallelism,
    Precision,
    Run,
    Optimization,
    Checkpointing,
    FaultTolerance,
    InProcessRestart,
    RankMonitoring,
    FaultInjection,
    DataFlags,
    LoggingConfig,
    ProfilingConfig,
)
SAME_NAMES = {
    Architecture: [TransformerConfig],
    MixtureOfExperts: [TransformerConfig],
    TransformerOptions: [TransformerConfig],
    Parallelism: [TransformerConfig, OptimizerConfig, DistributedDataParallelConfig],
    Precision: [TransformerConfig, OptimizerConfig],
    Optimization: [OptimizerConfig],
}
"""To which of upstream's configurations `same_names` hands the flags of a group."""
ARGUMENT_OF_THE_PARSER = {"--yaml-cfg", "--help", "-h", "--model-preset", "--version"} | {
    "--print-completion"
}


def shown_flags():
    actions = build_parser()._actions
    return {
        option: action
        for action in actions
        if action.help != argparse.SUPPRESS
        for option in action.option_strings
    }


def test_the_list_of_flags_is_frozen():
    """Users have scripts: a flag is added to the list with the change that adds it, none goes."""
    assert sorted(shown_flags()) == FROZEN.read_text().splitlines()


def test_each_flag_is_declared_by_one_field():
    declared = [flag_name(field) for group in GROUPS for field in dataclasses.fields(group)]
    assert sorted({*declared, *ARGUMENT_OF_THE_PARSER}) == sorted(shown_flags())
    assert len(declared) == len(set(declared))


def test_fields_of_megatron_core_are_read_as_it_declares_them():
    """They are read as text, since flags are parsed before it may be imported."""
    declared = {field.name: field for field in dataclasses.fields(TransformerConfig)}
    assert len(config_fields()) > 200
    for field in config_fields().values():
        default = declared[field.name].default
        named = declared[field.name].metadata.get("argparse_meta", {}).get("arg_names")
        assert named is None or field.flags == tuple(named)
        if field.default is not None:
            assert field.default == getattr(default, "name", default), field.name
    assert set(COVERED) <= config_fields().keys()


def test_each_flag_has_a_help_of_one_line():
    for option, action in shown_flags().items():
        assert action.help, option
        assert "\n" not in action.help


def test_every_flag_of_megatron_lm_is_a_setting_or_answered():
    settings = build_parser().flags
    theirs = (FROZEN.parent / "megatron_lm_flags.txt").read_text().split()
    assert len(theirs) > 600
    others = [flag for flag in theirs if flag not in settings | ALIASES.keys()]
    ours = {flag: resolve([flag], settings).rest for flag in others}  # --disable-x is --no-x
    assert [flag for flag, rest in ours.items() if rest == (flag,)] == []
    assert [flag for flag, rest in ours.items() if not settings.issuperset(rest)] == []


def test_other_words_of_megatron_lm_mean_the_same():
    given = (
        "--use-rotary-position-embeddings",
        "--recompute-activations",
        "--encoder-seq-length=8",
    )
    flags = (
        "--position-embedding-type=rope",
        "--recompute-granularity=selective",
        "--seq-length=8",
    )
    other, ours = (tiny_arguments(*words, base=PLAIN) for words in (given, flags))
    assert dataclasses.asdict(other.architecture) == dataclasses.asdict(ours.architecture)
    assert other.data.seq_length == ours.data.seq_length == 8


def test_what_changes_nothing_is_known():
    flags = (
        "--use-flash-attn",
        "--log-energy",
        "--sequence-parallel",
        "--onnx-safe",
        "--log-energy",
    )
    told = tiny_arguments(*flags, "--use-mcore-models").without_effect
    assert told == ("--use-flash-attn", "--log-energy", "--onnx-safe", "--sequence-parallel")


def test_a_flag_is_in_one_table():
    settings = build_parser().flags
    refused = [flag for feature in FEATURES.values() for flag in feature.flags.split()]
    assert len(refused) == len(set(refused))
    for table in (refused, AS_IT_IS, WITHOUT_EFFECT, ALIASES):
        assert settings.isdisjoint(table)
    assert WITHOUT_EFFECT.isdisjoint([*refused, *AS_IT_IS, *ALIASES])
    assert all(settings >= feature.values.keys() for feature in FEATURES.values())


def test_what_no_field_is_called_is_no_answer():
    assert answer("--num-leyers") is None
    assert answer("--no-such-flag") is None


def read_names():
    """Returns the names that the package reads as attributes, or names in strings for getattr.

    A check that compares a value is no reader: functions that only check are left out.
    """
    names = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(_without_checks(ast.parse(path.read_text(encoding="utf-8")))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                names.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.add(node.value)
    return names


class _DropChecks(ast.NodeTransformer):
    """Drops what declares flags or only checks them."""

    def visit_FunctionDef(self, node):
        is_check = node.name.startswith(("check_", "_check")) or node.name == "add_flags"
        return None if is_check else self.generic_visit(node)

    def visit_Assign(self, node):
        names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        return None if "PRESETS" in names else self.generic_visit(node)

    def visit_AnnAssign(self, node):
        is_preset = isinstance(node.target, ast.Name) and node.target.id == "PRESETS"
        return None if is_preset else self.generic_visit(node)


def _without_checks(tree):
    return _DropChecks().visit(tree)


def handed_on(group):
    """Returns the names of a group's fields that are read without being named."""
    if group is InProcessRestart:
        return {f"inprocess_{name}" for name in InProcessRestart().times}
    return {
        field.name for config in SAME_NAMES.get(group, ()) for field in dataclasses.fields(config)
    }


def test_every_flag_is_read_outside_of_the_parser():
    """But for a flag that has one choice only, which Megatron-LM's scripts give."""
    read = read_names()
    unread = [
        flag_name(field)
        for group in GROUPS
        for field in dataclasses.fields(group)
        if field.name not in read | handed_on(group) and len(field.metadata["choices"] or ()) != 1
    ]
    assert unread == []


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_needs_no_further_flag_of_the_network(preset):
    flags = ["--mock-data", "--tokenizer-type=NullTokenizer", "--vocab-size=64"]
    run = ["--micro-batch-size=1", "--train-iters=2", "--lr=1e-3"]
    arguments = parse([f"--model-preset={preset}", *flags, *run], 1)
    for name, value in PRESETS[preset].items():
        for group in (arguments.architecture, arguments.moe):
            if hasattr(group, name):
                assert getattr(group, name) == value


@pytest.mark.parametrize("order", [1, -1])
def test_an_explicit_flag_overrides_the_preset_wherever_it_stands(order):
    given = ["--model-preset=tiny", "--num-layers=6", "--moe-aux-loss-coeff=0.5"][::order]
    arguments = tiny_arguments(*given)
    assert arguments.architecture.num_layers == 6
    assert arguments.moe.moe_aux_loss_coeff == (0.5,)
    assert arguments.architecture.num_attention_heads == PRESETS["tiny"]["num_attention_heads"]


def test_an_explicit_flag_overrides_the_preset_even_with_the_default_of_the_flag():
    assert tiny_arguments("--normalization=LayerNorm").architecture.normalization == "LayerNorm"
    assert tiny_arguments("--moe-aux-loss-coeff=0.0").moe.moe_aux_loss_coeff == (0.0,)
    assert tiny_arguments("--hidden-dropout=0.1").architecture.hidden_dropout == 0.1


def test_one_job_leaves_no_defaults_to_the_next():
    tiny_arguments()
    with pytest.raises(UserError, match="--num-layers is missing"):
        parse(
            ["--mock-data", "--tokenizer-type=NullTokenizer", "--vocab-size=64", "--seq-length=8"],
            1,
        )


def test_the_program_imports_torch_after_its_flags_are_read():
    """What torch reads from the environment when it is imported depends on them."""
    program = "import sys, megatron_moevement.training.program; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


def test_flags_are_not_abbreviated():
    with pytest.raises(UserError, match="--num-layer"):
        tiny_arguments("--num-layer=2")
