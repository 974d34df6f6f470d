# SPDX-License-Identifier: Apache-2.0
"""Packages the project; the metadata is in pyproject.toml.

The patch series lies at the top of the repository, where readers of a fork look for it, and
becomes package data of the fork's builder, so that an installed package can build the fork too.
So do the scripts that users start and watch jobs with; those for developers stay where they are.
What the page of a report is made of is package data, too.
"""

from setuptools import find_packages, setup

PATCHES = "megatron_moevement.integrations.megatron.fork.patches"
SCRIPTS = "megatron_moevement.scripts"

setup(
    py_modules=["pretrain_moe"],
    packages=[*find_packages(include=["megatron_moevement*"]), PATCHES, SCRIPTS],
    package_dir={PATCHES: "patches", SCRIPTS: "scripts"},
    package_data={
        "megatron_moevement": ["py.typed"],
        "megatron_moevement.cli": ["page/*"],
        PATCHES: ["*/UPSTREAM", "*/series", "*/*.patch"],
        SCRIPTS: [
            "kubernetes.yaml",
            "moevement-dashboard.json",
            "moevement-rules.yml",
            "run_ft_launcher.sh",
            "train_moe.sbatch",
        ],
    },
)
