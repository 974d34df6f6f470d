# SPDX-License-Identifier: Apache-2.0
# MoEvement on an NGC PyTorch image, which brings torch, NCCL, triton, TransformerEngine and apex.
# None of them is installed again: the fork and this package come without their dependencies.
#   docker build --tag moevement .
# 26.08 is the first one whose torch (2.14.0a0) fits pyproject.toml; 26.07 has a 2.13 before its release.
ARG FROM_IMAGE_NAME=nvcr.io/nvidia/pytorch:26.08-py3
FROM ${FROM_IMAGE_NAME}

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
WORKDIR /workspace/moevement
COPY . .

# Dependencies are not resolved below, so the torch of the base image is compared here.
RUN python -c 'import sys, tomllib; from importlib.metadata import version; from packaging.requirements import Requirement; \
        needed = map(Requirement, tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"]); \
        torch = next(one for one in needed if one.name == "torch"); \
        torch.specifier.contains(version("torch"), prereleases=True) or sys.exit(f"{torch} is needed, the image has {version(torch.name)}")'

# What the base image may lack of the other dependencies, whatever versions it constrains pip to.
RUN grep -E '^(blake3|cffi|cryptography|rich|markdown-it-py|mdurl|nvidia-resiliency-ext|psutil|pycparser|pygments|shtab|tokenizers|xxhash)==' constraints.txt \
        >/tmp/requirements.txt \
    && PIP_CONSTRAINT="" python -m pip install --no-cache-dir --no-deps --requirement /tmp/requirements.txt \
    && rm /tmp/requirements.txt

RUN python -m megatron_moevement.integrations.megatron.fork install \
    && python -m pip install --no-cache-dir --no-deps .

# The image is good only if the installed parts find each other and a model trains; there is no GPU
# while an image is built.
WORKDIR /workspace
RUN python -m megatron_moevement.integrations.megatron.fork check \
    && python -c 'import torch, transformer_engine, apex, megatron.core, nvidia_resiliency_ext.inprocess, megatron_moevement.cli' \
    && python moevement/pretrain_moe.py --moevement-backend cpu --model-preset tiny --mock-data \
        --tokenizer-type NullTokenizer --vocab-size 256 --micro-batch-size 1 \
        --global-batch-size 2 --train-iters 2 --lr 1e-3
