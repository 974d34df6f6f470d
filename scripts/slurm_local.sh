#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs a command beside a real Slurm of virtual nodes on this machine, and takes the Slurm down after it:
#   scripts/slurm_local.sh COMMAND...        (as root; apt-get install -y slurmctld slurmd slurm-client munge)
# Network, /dev/shm and host names are the command's own, so that nothing else of the machine is touched.
# NODES=3: virtual nodes n1, n2, ... in the partitions `work` and `urgent`; jobs of `urgent` preempt
# those of `work`, which are queued again after GRACE_S=0 seconds for a save (GraceTime).
# SLURM_LOCAL has, for the command, the folder of daemons and logs.
# A node fails when its daemon and its steps are killed: see fail_node in tests/harness/slurm_job.py.
set -euo pipefail

if [ -z "${SLURM_LOCAL_INSIDE:-}" ]; then
    for program in slurmctld slurmd munged sbatch unshare; do
        type -P "$program" >/dev/null || {
            echo "$0: no program $program: apt-get install -y slurmctld slurmd slurm-client munge" >&2
            exit 2
        }
    done
    SLURM_LOCAL_INSIDE=1 exec unshare --net --mount --pid --fork --mount-proc --kill-child "$0" "$@"
fi

SLURM_LOCAL="$(mktemp -d)"
NODES="${NODES:-3}"
ip link set lo up
mount -t tmpfs -o "size=${SHM_BYTES:-8g}" tmpfs /dev/shm
mkdir -p "$SLURM_LOCAL"/{state,spool,log}
cp /etc/hosts "$SLURM_LOCAL/hosts"
for ((node = 1; node <= NODES; node++)); do
    ip address add "10.254.0.$node/32" dev lo
    echo "10.254.0.$node n$node" >>"$SLURM_LOCAL/hosts"
done
mount --bind "$SLURM_LOCAL/hosts" /etc/hosts

HOST="$(hostname -s)"
cat >"$SLURM_LOCAL/slurm.conf" <<CONF
ClusterName=local
SlurmctldHost=$HOST(10.254.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$SLURM_LOCAL/munge.socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
StateSaveLocation=$SLURM_LOCAL/state
SlurmdSpoolDir=$SLURM_LOCAL/spool/%n
SlurmctldLogFile=$SLURM_LOCAL/log/slurmctld.log
SlurmdLogFile=$SLURM_LOCAL/log/%n.log
SlurmctldPidFile=$SLURM_LOCAL/slurmctld.pid
SlurmdPidFile=$SLURM_LOCAL/%n.pid
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,batch_sched_delay=0,requeue_delay=1
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
SlurmdTimeout=10
InactiveLimit=0
KillWait=5
MinJobAge=3600
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n[1-$NODES] NodeHostname=$HOST NodeAddr=10.254.0.[1-$NODES] Port=[17001-$((17000 + NODES))] CPUs=${CPUS:-4} RealMemory=6000 State=UNKNOWN
PartitionName=work Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=${GRACE_S:-0}
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2
CONF
export SLURM_LOCAL SLURM_CONF="$SLURM_LOCAL/slurm.conf"

dd if=/dev/urandom of="$SLURM_LOCAL/munge.key" bs=1024 count=1 2>/dev/null
chmod 600 "$SLURM_LOCAL/munge.key"
munged --force --socket "$SLURM_LOCAL/munge.socket" --key-file "$SLURM_LOCAL/munge.key" \
    --pid-file "$SLURM_LOCAL/munge.pid" --seed-file "$SLURM_LOCAL/munge.seed" \
    --log-file "$SLURM_LOCAL/log/munge.log" 2>/dev/null
slurmctld
for ((node = 1; node <= NODES; node++)); do
    slurmd -N "n$node"
done
for ((waited = 0; waited < 300; waited++)); do
    [ "$(sinfo -h -N -p work -t idle -o %N 2>/dev/null | wc -l)" -lt "$NODES" ] || break
    sleep 0.1
done
code=0
"$@" || code=$? # daemons and whatever still runs end with this process, the first one of its namespace
rm -rf "$SLURM_LOCAL"
exit "$code"
