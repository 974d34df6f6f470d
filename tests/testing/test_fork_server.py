# SPDX-License-Identifier: Apache-2.0
"""The fork server runs real ranks, reports how they ended, and leaves nothing behind."""

import atexit
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.harness.fork_server import ForkServer, JobFailedError, OnRankFailure

pytestmark = pytest.mark.distributed


def _join() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))


def reduce_over_ranks(value: float) -> dict[str, float]:
    _join()
    mine = torch.full((3,), value * (dist.get_rank() + 1))
    dist.all_reduce(mine)
    dist.destroy_process_group()
    return {"rank": int(os.environ["RANK"]), "sum": mine[0].item()}


def train_with_autograd() -> float:
    weight = torch.ones(64, 64, requires_grad=True)
    (weight @ weight).sum().backward()
    return weight.grad.sum().item()


def speak(text: str) -> None:
    print(f"{text} from {os.environ['RANK']}")
    print("careful", file=sys.stderr)


def raise_on(rank: int) -> None:
    if int(os.environ["RANK"]) == rank:
        raise ValueError("broken on purpose")


def exit_with(code: int) -> None:
    sys.exit(code)


def hang() -> None:
    print("hanging")
    time.sleep(600)


def hang_unless_failing(rank: int) -> None:
    raise_on(rank)
    hang()


def freeze() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def megatron_is_imported() -> list[bool]:
    imported = [name in sys.modules for name in ("megatron.core.parallel_state", "torch")]
    from megatron.core import parallel_state  # noqa: PLC0415  (on the host backend only)

    _join()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return [*imported, stages == 2]


def wait_for_term() -> str:
    received = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: received.set())
    print("ready")
    received.wait(60)
    return "terminated"


def survive_loss_of_rank_0() -> str:
    """Rank 0 dies; the others still reach the store, which no rank hosts."""
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False
    )
    if os.environ["RANK"] == "0":
        print("joined")
        time.sleep(600)
    store.wait(["rank 0 is dead"], timedelta(seconds=30))
    return store.get("value").decode()


def daemonize_a_grandchild() -> int:
    child = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True
    )
    return child.pid


def leave_a_listener() -> list[int]:
    listener = socket.create_server(("127.0.0.1", 0))
    pid = os.fork()
    if pid == 0:
        os.setsid()
        time.sleep(600)
        os._exit(0)
    return [pid, listener.getsockname()[1]]


def leave_somebody_for_a_moment() -> None:
    if os.fork() == 0:
        os.setsid()
        time.sleep(0.3)
        os._exit(0)


def facts() -> dict[str, object]:
    return {
        "pid": os.getpid(),
        "session": os.getsid(0),
        "random": random.random(),
        "numpy": float(np.random.random()),
        "torch": torch.rand(1).item(),
        "env": os.environ.get("MOEVEMENT_TEST_VALUE"),
        "cwd": os.getcwd(),
        "stdin": os.read(0, 1).decode(),
        "torch_threads": torch.get_num_threads(),
    }


def return_something_odd() -> object:
    return object()


def mark_at_exit(path: str) -> None:
    atexit.register(Path(path).write_text, "left in order")


def test_ranks_reduce_over_gloo_and_return_their_values(fork_server):
    result = fork_server.run(reduce_over_ranks, world_size=4, args=[0.5]).check()
    assert result.values == tuple({"rank": rank, "sum": 5.0} for rank in range(4))


def test_ranks_run_autograd_after_the_fork(fork_server):
    assert fork_server.run(train_with_autograd, world_size=1).check().values == (524288.0,)


def test_each_rank_has_its_own_output_files(fork_server):
    result = fork_server.run(speak, world_size=2, args=["hello"]).check()
    assert [rank.stdout for rank in result.ranks] == ["hello from 0\n", "hello from 1\n"]
    assert [rank.stderr for rank in result.ranks] == ["careful\n", "careful\n"]


def test_a_raising_rank_fails_alone_and_shows_its_traceback(fork_server):
    result = fork_server.run(raise_on, world_size=3, args=[1])
    assert result.exit_codes == (0, 1, 0)
    assert "ValueError: broken on purpose" in result.ranks[1].stderr
    with pytest.raises(JobFailedError, match="broken on purpose"):
        result.check()


def test_the_exit_code_of_a_rank_is_what_it_exits_with(fork_server):
    assert fork_server.run(exit_with, world_size=2, args=[75]).exit_codes == (75, 75)


def test_a_job_that_takes_too_long_shows_where_it_was_and_is_killed(fork_server):
    result = fork_server.run(hang, world_size=2, timeout_s=3)
    assert result.timed_out
    assert result.exit_codes == (-signal.SIGABRT, -signal.SIGABRT)
    assert "in hang" in result.ranks[0].stderr
    with pytest.raises(JobFailedError, match="timed out"):
        result.check()


def test_a_rank_that_can_not_react_any_more_is_killed_too(fork_server):
    result = fork_server.run(freeze, world_size=2, timeout_s=3, abort_grace_s=0.1)
    assert result.timed_out
    assert result.exit_codes == (-signal.SIGKILL, -signal.SIGKILL)


def test_ranks_do_not_outlive_the_test_process(tmp_path):
    program = (
        "import os, signal, sys\n"
        f"sys.path[:0] = {sys.path!r}\n"
        "sys.path.insert(0, os.path.dirname(__file__))\n"
        "import hanging\n"
        "from tests.harness.fork_server import ForkServer\n"
        "job = ForkServer(preload=['hanging']).start(hanging.hang, world_size=2)\n"
        "print(*job.pids, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    (tmp_path / "hanging.py").write_text("import time\ndef hang():\n    time.sleep(600)\n")
    (tmp_path / "program.py").write_text(program)
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, tmp_path / "program.py"]
    killed = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL
    pids = killed.stdout.split()
    assert len(pids) == 2
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.01)  # the limit is the test's own


def test_ranks_find_megatron_imported(megatron_fork_server):
    result = megatron_fork_server.run(megatron_is_imported, world_size=2).check()
    assert result.values == ([True, True, True],) * 2


def test_the_others_are_stopped_when_one_fails_and_that_is_asked_for(fork_server):
    result = fork_server.run(
        hang_unless_failing, world_size=2, args=[1], on_rank_failure=OnRankFailure.STOP_JOB
    )
    assert result.exit_codes == (-signal.SIGKILL, 1)
    assert not result.timed_out


def test_a_signal_reaches_the_rank_it_is_meant_for(fork_server):
    with fork_server.start(wait_for_term, world_size=2) as job:
        job.wait_for_output(0, "ready")
        job.wait_for_output(1, "ready")
        job.kill(1, signal.SIGTERM)
        assert job.wait_for_rank(1) == 0
        job.kill(0, signal.SIGKILL)
        result = job.wait()
    assert result.exit_codes == (-signal.SIGKILL, 0)
    assert result.values == (None, "terminated")


def test_the_store_outlives_rank_0(fork_server):
    with fork_server.start(survive_loss_of_rank_0, world_size=2) as job:
        job.wait_for_output(0, "joined")
        job.kill(0)
        assert job.wait_for_rank(0) == -signal.SIGKILL
        store = dist.TCPStore(*job.store_address, is_master=False)
        store.set("value", "still here")
        store.set("rank 0 is dead", "")
        del store
        assert job.wait().values == (None, "still here")


def test_no_process_of_a_job_is_left_not_even_a_daemon(fork_server):
    result = fork_server.run(daemonize_a_grandchild, world_size=2).check()
    assert not any(Path(f"/proc/{pid}").exists() for pid in result.values)


def test_who_outlives_the_ranks_for_too_long_is_reported_and_killed(fork_server):
    result = fork_server.run(leave_a_listener, world_size=2, orphans_s=0.1).check()
    assert len(result.orphans) == 2
    for pid, port in result.values:
        (line,) = [one for one in result.orphans if f" {pid}" in one]
        assert re.fullmatch(rf"python {pid} \(\w \(\w+\) in .*\), listens at {port}", line)
        assert not Path(f"/proc/{pid}").exists()


def test_who_ends_soon_after_the_ranks_is_not_reported(fork_server):
    job = fork_server.run(leave_somebody_for_a_moment, world_size=2, orphans_s=60)
    assert job.check().orphans == ()


def test_leaving_a_job_kills_what_still_runs(fork_server):
    with fork_server.start(hang, world_size=2) as job:
        pids = job.pids
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_waiting_for_output_that_never_comes_fails(fork_server):
    with (
        fork_server.start(speak, world_size=1, args=["hello"]) as job,
        pytest.raises(JobFailedError, match="never printed 'goodbye'"),
    ):
        job.wait_for_output(0, "goodbye")


def test_ranks_are_seeded_apart_and_alike_in_every_job(fork_server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second = (
        fork_server.run(facts, world_size=2, env={"MOEVEMENT_TEST_VALUE": "x"}).check().values
        for _ in range(2)
    )
    for stream in ("random", "numpy", "torch"):
        assert first[0][stream] == second[0][stream]
        assert first[0][stream] != first[1][stream]
    assert first[0]["pid"] != second[0]["pid"]
    assert first[0]["session"] == first[0]["pid"]
    assert first[0]["env"] == "x"
    assert first[0]["cwd"] == str(tmp_path)
    assert first[0]["stdin"] == ""
    assert first[0]["torch_threads"] == 1


def test_a_value_that_json_can_not_hold_fails_the_rank(fork_server):
    result = fork_server.run(return_something_odd, world_size=1)
    assert result.exit_codes == (1,)
    assert "not JSON serializable" in result.ranks[0].stderr


def test_exit_handlers_of_a_rank_run(fork_server, tmp_path):
    fork_server.run(mark_at_exit, world_size=1, args=[str(tmp_path / "mark")]).check()
    assert (tmp_path / "mark").read_text() == "left in order"


def test_a_program_sees_its_command_line_and_its_exit_code_is_kept(fork_server, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\n"
        "if __name__ == '__main__':\n"
        "    print(os.environ['RANK'], *sys.argv[1:])\n"
        "    sys.exit(int(sys.argv[2]))\n"
    )
    result = fork_server.run_program(program, ["--code", "2"], world_size=2)
    assert result.exit_codes == (2, 2)
    assert [rank.stdout for rank in result.ranks] == ["0 --code 2\n", "1 --code 2\n"]


def test_a_program_that_raises_exits_as_under_the_interpreter(fork_server, tmp_path):
    program = tmp_path / "program.py"
    program.write_text("raise SystemExit('no luck')\n")
    result = fork_server.run_program(program, [], world_size=1)
    assert (result.exit_codes, result.ranks[0].stderr) == ((1,), "no luck\n")


def test_a_function_that_ranks_can_not_import_is_refused(fork_server):
    with pytest.raises(ValueError, match="ranks can't import"):
        fork_server.run(lambda: None, world_size=1)


def test_a_preload_hook_that_starts_a_thread_is_refused(tmp_path, monkeypatch):
    (tmp_path / "threaded_hook.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RuntimeError, match="has 2 threads after its preload hooks"):
        ForkServer(preload=["threaded_hook"])


def test_a_preload_hook_is_called_once_before_the_ranks(tmp_path, monkeypatch):
    (tmp_path / "hook.py").write_text(
        "import os\ndef preload():\n    os.environ['HOOK_PID'] = str(os.getpid())\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    program = tmp_path / "program.py"
    program.write_text("import os; print(os.environ['HOOK_PID'] != str(os.getpid()))")
    with ForkServer(preload=["hook:preload"]) as server:
        result = server.run_program(program, [], world_size=2).check()
    assert [rank.stdout for rank in result.ranks] == ["True\n", "True\n"]
