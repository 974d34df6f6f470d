# SPDX-License-Identifier: Apache-2.0
"""The CPU backend: Megatron-Core computes on the host, and torch stays as it is."""

import subprocess
import sys
import textwrap

import pytest
import torch

from megatron_moevement.backends import host_cuda
from megatron_moevement.backends.cpu import on_host
from megatron_moevement.backends.host_cuda import HostBackendError


def run_alone(source):
    """Runs Python source in a process that has imported nothing."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(source)],
        capture_output=True,
        text=True,
        check=False,
    )


def compiled(source):
    """Returns the names that the rewritten source defines, with torch prepared as installed."""
    names = {"torch": torch}
    exec(on_host(compile(textwrap.dedent(source), "<megatron>", "exec")), names)
    return names


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(torch, "moevement_host", host_cuda, raising=False)
    monkeypatch.setattr(torch.Tensor, "moevement_host", lambda self: self, raising=False)


def test_literals_factories_and_types_resolve_to_the_host(installed):
    names = compiled(
        """
        def build(device="cuda"):
            here = torch.zeros(1, device=device)
            there = torch.ones(1, device=torch.cuda.current_device())
            return here, there, here.cuda().is_cuda, here.type() == "torch.cuda.FloatTensor"
        """
    )
    here, there, on_device, is_float = names["build"]()
    assert {here.device.type, there.device.type} == {"cpu"}
    assert on_device
    assert is_float


def test_nested_functions_and_classes_are_rewritten_as_well(installed):
    names = compiled(
        """
        class Layer:
            def outer(self):
                def inner():
                    return [torch.empty(1, device="cuda").device.type for _ in (1,)]
                return inner()
        """
    )
    assert names["Layer"]().outer() == ["cpu"]


def test_what_the_host_does_not_stand_in_for_says_so(installed):
    names = compiled("def capture(): return torch.cuda.graph_pool_handle()")
    with pytest.raises(HostBackendError, match=r"torch\.cuda\.graph_pool_handle .*needs a GPU"):
        names["capture"]()


def test_torch_itself_is_untouched_and_uninstalling_forgets_megatron():
    result = run_alone(
        """
        import sys, torch
        before = {name: getattr(torch.cuda, name) for name in ("current_device", "Stream")}
        factories = (torch.zeros, torch.Tensor.to, torch.Tensor.type, torch.Tensor.cuda)
        from megatron_moevement.backends import cpu
        uninstall = cpu.install()
        import megatron.core.tensor_parallel.random as on_host
        assert on_host.torch.cuda is torch.cuda
        assert before == {name: getattr(torch.cuda, name) for name in before}
        assert factories == (torch.zeros, torch.Tensor.to, torch.Tensor.type, torch.Tensor.cuda)
        state = on_host._get_cuda_rng_state()
        assert torch.equal(state, torch.get_rng_state())
        uninstall()
        assert not hasattr(torch, "moevement_host")
        assert "megatron.core" not in sys.modules
        import megatron.core.tensor_parallel.random as pristine
        code = pristine._get_cuda_rng_state.__code__
        assert "cuda" in code.co_names
        """
    )
    assert result.returncode == 0, result.stderr


def test_installing_after_megatron_was_imported_is_refused():
    result = run_alone(
        """
        import megatron.core
        from megatron_moevement.backends import cpu
        cpu.install()
        """
    )
    assert result.returncode == 1
    assert "was imported before the cpu backend was installed" in result.stderr


def test_installing_twice_is_installing_once():
    result = run_alone(
        """
        import sys
        from megatron_moevement.backends import cpu
        cpu.install(); cpu.install()
        finders = [f for f in sys.meta_path if type(f).__name__ == "_HostFinder"]
        assert len(finders) == 1
        """
    )
    assert result.returncode == 0, result.stderr


def test_the_bytecode_cache_keeps_the_original_code(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    package = tmp_path / "megatron"
    package.mkdir()
    (package / "cached.py").write_text("def device(): return 'cuda'\n")
    source = f"""
        import sys; sys.path.insert(0, {str(tmp_path)!r})
        from megatron_moevement.backends import cpu
        if len(sys.argv) > 1: cpu.install()
        import megatron.cached
        print(megatron.cached.device())
        """
    with_backend = textwrap.dedent(source)
    command = [sys.executable, "-c", with_backend]
    assert subprocess.check_output([*command, "install"], text=True) == "cpu\n"
    assert list(package.glob("__pycache__/cached.*.pyc"))
    assert subprocess.check_output(command, text=True) == "cuda\n"
