# MoEvement on an NGC PyTorch image, which brings torch, NCCL, triton, TransformerEngine and apex.
# None of them is installed again: the fork and this package come without their dependencies.
#   docker build --tag moevement .
ARG FROM_IMAGE_NAME=nvcr.io/nvidia/pytorch:25.11-py3
FROM ${FROM_IMAGE_NAME}

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
WORKDIR /workspace/moevement
COPY . .

# What the base image may lack of the other dependencies, whatever versions it constrains pip to.
RUN grep -E '^(rich|markdown-it-py|mdurl|nvidia-resiliency-ext|psutil|pygments|tokenizers|xxhash)==' constraints.txt \
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
