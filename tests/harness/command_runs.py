# SPDX-License-Identifier: Apache-2.0
"""What runs each command of the pages."""

from __future__ import annotations

import dataclasses
from datetime import timedelta


@dataclasses.dataclass(frozen=True)
class Here:
    """Run by this file.

    Attributes:
        added: what the command is given besides, for it to end at once and to touch nothing.
        code: the exit code with which it ends.
    """

    added: tuple[str, ...] = ()
    code: int = 0


@dataclasses.dataclass(frozen=True)
class By:
    """Run by something else.

    Attributes:
        file: that has it.
        name: of a test, or the words with which a script runs it.
    """

    file: str
    name: str


@dataclasses.dataclass(frozen=True)
class Slow:
    """Run by this file where slow tests are asked for."""

    limit: timedelta = timedelta(minutes=30)


HERE, SLOW = Here(), Slow()
HOURS = Slow(timedelta(hours=3))
RANKS = By("tests/launch/test_launch.py", "test_two_pipeline_stages_train_and_one_rank_prints")
CHECKED = By("tests/cli/test_check.py", "test_a_job_that_works_is_shown_on_one_screen")
SBATCH = By("tests/launch/test_sbatch.py", "test_each_task_takes_its_rank_from_slurm")
IMAGE = By("scripts/lint.sh", "check_if_installed hadolint Dockerfile")
RUNS = {
    r"\./scripts/demo\.sh": By("tests/launch/test_demo.py", "test_a_killed_rank_costs_no_bit"),
    r"\./scripts/demo_recovery\.sh": SLOW,
    r"\./scripts/(setup|test)\.sh": By(".ci/run", "./scripts/test.sh"),  # which sets up
    r"\./scripts/lint\.sh|bash \.ci/run": By(".ci/run", "./scripts/lint.sh"),
    r"\.venv/bin/mkdocs serve": By("tests/engineering/test_site.py", "test_every_page_is_there"),
    r"\./scripts/mutations\.sh": SLOW,
    r"\./scripts/test\.sh -m 'slow or not slow' tests/launch/test_slurm\.py": By(
        "tests/launch/test_slurm.py", "test_what_a_job_loses_changes_no_bit"
    ),
    r"TIER_KILLS=200 \./scripts/tier_campaign\.sh .*": SLOW,
    r"\./scripts/explore\.sh --report": By(
        "tests/testing/test_explorer_pieces.py",
        "test_the_report_names_totals_histograms_and_failures",
    ),
    r"\./scripts/explore\.sh --story .*": By(
        "tests/testing/test_explorer_seeds.py", "test_everything_is_as_promised"
    ),
    r"\./scripts/explore\.sh --seeds .*": HOURS,
    r"\./scripts/gpu_check\.sh.*": By(
        "tests/testing/test_gpu_check.py",
        "test_the_command_runs_small_on_a_cpu_and_goes_on_where_it_was",
    ),
    r"\./scripts/run_local\.sh .* --moevement-faults .*": By(
        "tests/training/test_fault_injection.py",
        "test_an_exception_in_the_backward_pass_fails_the_job",
    ),
    r"\./scripts/run_local\.sh .* --moevement-mtbf .*": By(
        "tests/training/test_fault_injection.py",
        "test_drawn_faults_strike_who_and_when_the_seed_says_over_several_launches",
    ),
    r"\./scripts/run_local\.sh .* --moevement-fault-trace .*": By(
        "tests/training/test_fault_injection.py", "test_a_trace_strikes_at_its_time"
    ),
    r"\./scripts/run_local\.sh .* --metrics-address .*": By(
        "tests/launch/test_launch.py", "test_the_launcher_serves_metrics_until_the_job_ends"
    ),
    r"\./scripts/run_local\.sh .* -- check .*": By(
        "tests/cli/test_check_links.py", "test_all_pairs_that_copies_go_between_are_measured"
    ),
    r"\./scripts/run_local\.sh .* --inprocess-restart": By(
        "tests/strategies/test_restart.py",
        "test_spares_take_the_places_of_killed_processes_and_no_bit_changes",
    ),
    r"\./scripts/run_local\.sh -n 4 -- --model-preset tiny .*": RANKS,
    r"\./scripts/run_ft_launcher\.sh .*": By(
        "tests/strategies/test_ft_launcher.py",
        "test_a_killed_rank_is_restarted_and_the_job_goes_on_from_memory",
    ),
    r"(SPARES=\d |DATA_PATH=\S+ TOKENIZER_MODEL=\S+ )sbatch .*": SBATCH,
    r"CHECK=1 .*sbatch .*": By(
        "tests/launch/test_sbatch.py",
        "test_a_job_that_is_only_checked_is_looked_at_by_all_its_tasks",
    ),
    r"torchrun .* -m megatron_moevement\.cli check .*": By(
        "tests/cli/test_check_links.py", "test_a_launch_says_how_large_the_job_is"
    ),
    r"torchrun .*pretrain_moe\.py .*": By(
        "tests/launch/test_torchrun.py", "test_torchrun_trains_two_stages_with_protection"
    ),
    r"moevement (account|recoveries|status|report) EVENT_DIR": HERE,
    r"\.venv/bin/moevement recoveries runs/demo/\*/killed/events": By(
        "scripts/demo.sh", '"$moevement" recoveries "$run/killed/events"'
    ),
    r"git clone .* && cd .*": By(
        "tests/launch/test_setup.py", "test_a_second_run_says_and_does_nothing"
    ),
    r"moevement watch EVENT_DIR": Here(("--once",)),
    r"moevement status": Here(("--store-dir", "EMPTY"), code=2),  # which has nothing to say
    r"moevement inspect": Here(("--store-dir", "EMPTY")),
    r"kubectl apply -f kubernetes\.yaml": By(
        "tests/launch/test_kubernetes.py",
        "test_a_process_of_a_pod_is_killed_and_the_others_go_on",
    ),
    r"moevement scripts .*": HERE,
    r"moevement schedule .*": HERE,
    r"moevement data .*": HERE,
    r"stdlib=.*": By(
        "scripts/demo.sh", """'import sysconfig; print(sysconfig.get_path("stdlib"))'"""
    ),
    r"moevement ended .*": By(
        "tests/launch/test_sbatch.py", "test_the_end_of_a_killed_process_is_among_its_events"
    ),
    r"moevement check --paper": By(
        "tests/cli/test_check.py", "test_the_jobs_of_the_paper_are_shown_beside_its_figures"
    ),
    r"moevement check .*": CHECKED,
    r"moevement operators .*": By(
        "tests/strategies/test_operator_table.py",
        "test_the_ranks_of_a_job_are_started_and_one_of_them_is_chosen",
    ),
    r"moevement convert .*": By(
        "tests/strategies/test_convert.py", "test_the_command_starts_the_ranks_of_the_job"
    ),
    r"curl http://.*/metrics": By(
        "tests/cli/test_metrics.py", "test_each_metric_is_served_with_its_kind_and_its_meaning"
    ),
    r"fork check": HERE,
    r"(fork|python -m megatron_moevement\.integrations\.megatron\.fork) install": By(
        "tests/fork/test_wheel.py", "test_pip_installs_it_as_a_version_that_the_package_accepts"
    ),
    r"fork build .*": By(
        "tests/fork/test_wheel.py", "test_a_build_leaves_the_wheel_alone_in_its_directory"
    ),
    r"fork (edit|export) .*|cd \.\./megatron-fork && .*": By(
        "tests/fork/test_checkout.py", "test_a_commit_becomes_a_patch"
    ),
    r"git (checkout core|am ).*": By(
        "tests/fork/test_marker.py", "test_an_own_checkout_patched_by_git_am_counts"
    ),
    r"pip config set .*": HERE,
    r"pip install \.": By(
        "tests/engineering/test_packaging.py",
        "test_pip_installs_it_and_it_runs_without_the_repository",
    ),
    r"python -m venv /tmp/fresh|/tmp/fresh/bin/pip .*": By(
        "scripts/setup.sh", '"$1" -m venv "$VENV"'
    ),
    r"docker .*": IMAGE,
    r"\.venv/bin/python benchmarks/training_loop\.py": By(
        "tests/benchmarks/test_training_loop.py",
        "test_our_loop_has_the_losses_of_megatron_core_used_directly",
    ),
    r"\.venv/bin/python benchmarks/.*": HOURS,
    r"pytest .* tests/strategies/test_bystanders\.py": SLOW,
    r"\.venv/bin/python -m megatron_moevement\.testing\.simulate --seeds \d{4,}.*": SLOW,
    r"\.venv/bin/python -m megatron_moevement\.testing\.simulate .* --mutate .*": Here(code=1),
}
"""What runs a command, by how it looks; the first pattern that fits counts."""
