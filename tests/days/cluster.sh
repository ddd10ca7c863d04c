#!/usr/bin/env bash
# A platform engineer: the files for each kind of cluster, a dry run of them, and a job on a Ray of this machine that stores elsewhere.
source "$(dirname "${BASH_SOURCE[0]}")/day.sh"

# docs/start.md: gangway init my-project
shows 'gangway run config.yaml' gangway init my-project
cd my-project
gpus=(hosts.kind=gpu hosts.devices_per_host=8 storage=gs://my-bucket/runs)
slices=(hosts.kind=tpu hosts.accelerator=v6e hosts.topology=4x4 hosts.count=null storage=gs://my-bucket/runs)

# docs/deploy.md: gangway plan config.yaml
shows 'memory' gangway plan config.yaml
# What cannot be deployed is refused, all reasons at once.
# docs/deploy.md: gangway deploy config.yaml --to kuberay --image example.org/images/llama:1
ends 2 'storage' gangway deploy config.yaml --to kuberay
# docs/deploy.md: gangway deploy config.yaml --to kuberay --image example.org/images/llama:1
shows 'rayjob.yaml' gangway deploy config.yaml --to kuberay --image example.org/images/llama:1 "${gpus[@]}"
# docs/deploy.md: gangway deploy config.yaml --to gke-tpu --image
shows 'rayjob.yaml' gangway deploy config.yaml --to gke-tpu --image europe-docker.pkg.dev/my/images/llama:1 "${slices[@]}"
# docs/deploy.md: gangway deploy config.yaml --to tpu-vm --project my-project --zone us-east5-b
shows 'tpu_vm.sh submit' gangway deploy config.yaml --to tpu-vm --project my-project --zone us-east5-b "${slices[@]}"
# docs/deploy.md: gangway deploy config.yaml --to ray-cluster --zone us-east-1a --machine p5.48xlarge
shows 'ray up' gangway deploy config.yaml --to ray-cluster --zone us-east-1a --machine p5.48xlarge "${gpus[@]}"
# docs/deploy.md: gangway deploy config.yaml --to slurm storage=runs
shows 'sbatch' gangway deploy config.yaml --to slurm storage=runs
bash -n deploy/slurm/run.sh
bash -n deploy/tpu-vm/tpu_vm.sh
for target in kuberay gke-tpu tpu-vm ray-cluster slurm; do
  # docs/how_to.md: gangway run config.yaml --dry-run
  shows '^# hosts ' gangway run "deploy/$target/config.yaml" --dry-run
done

# A Ray with a token on ports of its own, for another may run here; `--block`, so that its end is the end of this process.
read -r port dashboard agent metrics < <(python3 - <<'PYTHON'
import socket

free = [socket.create_server(("127.0.0.1", 0)) for _ in range(4)]
print(*(server.getsockname()[1] for server in free))
PYTHON
)
export HOME=$FOLDER RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
unset RAY_AUTH_TOKEN
# docs/deploy.md: ray get-auth-token --generate
shows '.' ray get-auth-token --generate
temporary=$(mktemp -d /tmp/gw-XXXX)
# docs/deploy.md: ray start --head --node-ip-address=HEAD_IP --port=6379 --dashboard-host=127.0.0.1
behind ray.log ray start --head --node-ip-address=127.0.0.1 --port="$port" --dashboard-host=127.0.0.1 --dashboard-port="$dashboard" \
  --dashboard-agent-listen-port="$agent" --metrics-export-port="$metrics" --temp-dir="$temporary" --num-cpus=4 --block
seen ray.log 'Ray runtime started'
rm -rf deploy

# docs/deploy.md: ray job submit --address=http://127.0.0.1:8265 --working-dir . -- gangway run config.yaml
shows "Job '.*' succeeded" ray job submit --address="http://127.0.0.1:$dashboard" --working-dir . -- \
  gangway run config.yaml max_num_steps="$STEPS" storage="$FOLDER/bucket"
# docs/commands.md: gangway status runs --watch
shows 'spirals +finished' gangway status "$FOLDER/bucket"

kill "$BEHIND"
wait "$BEHIND" || true
BEHIND=
rm -rf "$temporary"
