#!/bin/bash
# Builds images of the Dockerfile without a registry of containers, and serves a completion from them.
#
#   docker/check.sh [orchestrator] [worker-cpu] [worker-gpu]     all of them without an argument
#
# The base image is Debian by debootstrap with an interpreter of this machine, in place of python:X.Y.Z. The
# images then run as user 1000 on a read-only root, with a Redis of the host. What cannot be checked here is
# said, and skipped with exit status 0.
#
#   PYTHON_PREFIX    an interpreter of the Dockerfile's minor version, such as pyenv's; found by itself there
#   TORCH_CPU_WHEEL  a CPU build of torch for that minor version; asked for by worker-cpu. One for another
#                    version builds worker-cpu with that version, and says so.
#   REDIS_SERVER     a Redis or Valkey server program of the host; found by itself, or the embedded one of .venv
#   WORK             directory of images and caches, 12 GB; removed in the end if it was not given
set -euo pipefail
cd "${BASH_SOURCE[0]%/*}/.."
DEBIAN=bookworm
LIBRARIES=ca-certificates,gcc,libc6-dev,libssl3,libffi8,zlib1g,libbz2-1.0,liblzma5,libreadline8,libsqlite3-0,libncursesw6,libexpat1,libuuid1,libgomp1,libstdc++6
START_TIMEOUT_S=240

skip() { echo "skipped: $*"; exit 0; }
say() { echo "== $* ($(date +%T))"; }
[ "$EUID" = 0 ] || skip "building needs root, this is user $EUID"
PATH=$PATH:/usr/sbin:/sbin
for program in buildah debootstrap unshare ip curl; do
  command -v $program > /dev/null || skip "no $program: apt-get install buildah debootstrap iproute2 curl"
done
EMBEDDED='from orchestrator.launcher.redis_server import redis_binary; print(redis_binary())'
REDIS_SERVER=${REDIS_SERVER:-$(command -v redis-server || command -v valkey-server || .venv/bin/python -c "$EMBEDDED" 2> /dev/null || true)}

KEEP=${WORK:+yes}
WORK=${WORK:-$(mktemp -d)}
mkdir -p "$WORK/tmp"
export TMPDIR=$WORK/tmp
buildah() { command buildah --root "$WORK/storage" --runroot "$WORK/runroot" --storage-driver "${STORAGE_DRIVER:-overlay}" "$@"; }

mounts=()
finish() {

  for container in "${mounts[@]}"; do buildah rm "$container" > /dev/null || true; done
  [ "$KEEP" ] || { buildah rm --all > /dev/null 2>&1 || true; buildah rmi --all --force > /dev/null 2>&1 || true; rm -rf "$WORK"; }
}
trap finish EXIT

FULL=$(sed -nE 's/^FROM python:([0-9.]+)-.*/\1/p' docker/Dockerfile | head -1)

prefix_of() {  # MINOR: the prefix of an interpreter of that minor version
  local found
  for found in ${PYTHON_PREFIX:-} "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".* /usr/local; do
    [ -x "$found/bin/python$1" ] && { echo "$found"; return; }
  done
  return 1
}

mirror() { sed -nE 's/^(URIs:|deb) +(http[^ ]+).*/\2/p' /etc/apt/sources.list /etc/apt/sources.list.d/debian.* 2> /dev/null | head -1; }

make_base() {  # MINOR: python:X.Y.Z-bookworm and its slim form, from this machine
  local prefix container root
  buildah inspect --type image "localhost/python:$1-$DEBIAN" > /dev/null 2>&1 && return
  prefix=$(prefix_of "$1") || skip "no Python $1 here, which the Dockerfile takes: set PYTHON_PREFIX"
  [ -d "$WORK/rootfs" ] || debootstrap --variant=minbase --include=$LIBRARIES $DEBIAN "$WORK/rootfs" "$(mirror)" > "$WORK/debootstrap.log"
  container=$(buildah from scratch)
  root=$(buildah mount "$container")
  cp -a "$WORK/rootfs/." "$root/"
  mkdir -p "$root/usr/local"
  cp -a "$prefix/." "$root/usr/local/"
  rm -rf "$root/usr/local/lib/python$1/test" "$root/usr/local/lib/python$1"/config-*
  find "$root/usr/local/lib" -name __pycache__ -prune -exec rm -rf {} +
  find "$root/usr/local/lib/python$1/site-packages" -mindepth 1 -maxdepth 1 ! -name 'pip*' -exec rm -rf {} +  # as in python:X.Y.Z
  sed -i "1s|^#!.*python.*|#!/usr/local/bin/python$1|" "$root/usr/local/bin/"pip*
  ln -sf "python$1" "$root/usr/local/bin/python"
  cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
  chroot "$root" ldconfig
  buildah umount "$container" > /dev/null
  buildah config --env PIP_CERT=/etc/ssl/certs/ca-certificates.crt --env PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$container"
  buildah commit --quiet --rm "$container" "localhost/python:$1-$DEBIAN" > /dev/null
}

build() {  # TARGET MINOR ARGUMENTS...
  local target=$1 minor=$2 began=$SECONDS
  shift 2
  say "build of $target with Python $minor"
  make_base "$minor"
  sed -E "s|^FROM python:[0-9.]+(-slim)?-$DEBIAN|FROM localhost/python:$minor-$DEBIAN|; s|/python[0-9]+\.[0-9]+/|/python$minor/|" \
    docker/Dockerfile > "$WORK/Dockerfile"
  buildah build --isolation chroot --network host --pull=never --layers --ignorefile docker/Dockerfile.dockerignore \
    -f "$WORK/Dockerfile" --target "$target" -t "localhost/gammaray-$target" "$@" . > "$WORK/$target.log" 2>&1 \
    || { tail -20 "$WORK/$target.log"; echo "failed: the build of $target"; exit 1; }
  say "$target: $(size "$target"), built in $((SECONDS - began)) s"
}

size() { buildah images --format '{{.Size}}' "localhost/gammaray-$1"; }

# Not on 6379, where Ray listens. Everything that serves has a network of its own, which has nothing but loopback, and ends with its first process.
serve() {
  ip link set lo up
  local url=redis://127.0.0.1:6380 log=$WORK/log
  mkdir -p "$log" "$WORK/redis"
  "$REDIS_SERVER" --port 6380 --bind 127.0.0.1 --save '' --dir "$WORK/redis" > "$log/redis" 2>&1 &
  inside worker-cpu "$log/target" GAMMARAY_REDIS_URL=$url python -m services.target_worker
  inside worker-cpu "$log/draft" GAMMARAY_REDIS_URL=$url python -m services.draft_worker
  inside orchestrator "$log/orchestrator" GAMMARAY_REDIS_URL=$url bash -c "$ORCHESTRATOR"
  local deadline=$((SECONDS + START_TIMEOUT_S)) body='{"model": "demo", "prompt": "def main():", "max_tokens": 32, "ignore_eos": true}'
  until answer=$(curl --silent --fail http://127.0.0.1:8000/v1/completions -H 'content-type: application/json' -d "$body"); do
    [ $SECONDS -lt $deadline ] || { tail -5 "$log"/*; echo "failed: no completion within $START_TIMEOUT_S s"; exit 1; }
    sleep 1
  done
  say "HTTP: $answer"
  inside orchestrator "$log/client" gammaray generate --address 127.0.0.1:9000 --max-tokens 32 "def main():"
  wait $! || { tail -5 "$log"/*; echo "failed: no completion over gRPC"; exit 1; }
  say "gRPC: $(cat "$log/client")"
  inside orchestrator "$log/id" bash -c 'id -u; touch /usr/local/x 2>&1; gammaray status --address 127.0.0.1:9000'
  wait $!
  cat "$log/id"
  grep -q "^1000$" "$log/id" && grep -q "Read-only file system" "$log/id" || { echo "failed: not user 1000 on a read-only root"; exit 1; }
}

ORCHESTRATOR='
cat > /tmp/serve.yaml << END
proxy_location: HeadOnly
http_options: {host: 127.0.0.1, port: 8000}
grpc_options: {port: 9000, grpc_servicer_functions: [orchestrator.api.grpc_handlers.add_generation_service]}
applications:
- {name: gammaray, route_prefix: /, import_path: "orchestrator.app:orchestrator", args: {settings: {model: demo}, replicas: 1}}
END
export $(python -c "from gammaray.deploy.serve_config import SERVE_ENVIRONMENT as found; print(*(f\"{k}={v}\" for k, v in found.items()))")
ray start --head --num-cpus=1 --object-store-memory=100000000 --include-dashboard=false && exec serve run /tmp/serve.yaml'

inside() {  # IMAGE LOG COMMAND...: in the background, as the image says, on a root that cannot be written
  local image=$1 log=$2 root
  shift 2
  root=$WORK/run/$image
  unshare --mount --propagation private bash -c '
    set -e
    root=$0 user=$1; shift
    mount --bind "$root" "$root"
    mount -o remount,ro,bind "$root"
    mount -t proc proc "$root/proc"
    mount --rbind /dev "$root/dev"
    mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
    mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
    exec chroot --userspec="$user" "$root" env -i --chdir=/tmp "$@"' \
    "$root" "$(config User "$image")" $(cat "$WORK/$image.env") "$@" > "$log" 2>&1 &
}

config() { cat "$WORK/$2.user"; }

mounted() {  # IMAGE: its files, and what its configuration says
  local container root
  container=$(buildah from "localhost/gammaray-$1")
  mounts+=("$container")
  root=$(buildah mount "$container")
  mkdir -p "$WORK/run"
  ln -sfn "$root" "$WORK/run/$1"
  buildah inspect --type image --format '{{.OCIv1.Config.User}}' "localhost/gammaray-$1" > "$WORK/$1.user"
  buildah inspect --type image --format '{{range .OCIv1.Config.Env}}{{.}} {{end}}' "localhost/gammaray-$1" > "$WORK/$1.env"
}

# vLLM's image cannot be had without a registry. Its packages are those that vLLM's wheel brings: the install step of
# the Dockerfile must find versions of the rest beside them. Only metadata is read, by uv, and nothing is installed.
check_gpu() {
  local version wanted
  version=$(sed -nE 's|^FROM vllm/vllm-openai:v([0-9.]+) .*|\1|p' docker/Dockerfile)
  wanted=$(sed -nE 's|.*"/src(\[.*\])".*|\1|p' docker/Dockerfile)
  say "worker-gpu: no base image here, so none is built; packages of vllm $version, then gammaray$wanted beside them"
  prefix_of "$1" > /dev/null || skip "no Python $1 here, which the Dockerfile takes: set PYTHON_PREFIX"
  "$(prefix_of "$1")/bin/python$1" -m venv "$WORK/uv"
  "$WORK/uv/bin/pip" install -q uv
  resolve "$1" "$WORK/vllm.txt" <<< "vllm==$version"
  { cat "$WORK/vllm.txt"; grep '^ray==' constraints.txt; } > "$WORK/base.txt"
  resolve "$1" "$WORK/gpu.txt" --constraint "$WORK/base.txt" \
    <<< "gammaray-demo-pair @ file://$PWD/services/demo_pair"$'\n'"gammaray$wanted @ file://$PWD"
  ! grep -vxFf "$WORK/gpu.txt" "$WORK/vllm.txt" || { echo "failed: these packages of vLLM would change"; exit 1; }
  say "$(wc -l < "$WORK/vllm.txt") packages of vLLM keep their versions, and these join them:"
  grep -vxFf "$WORK/vllm.txt" "$WORK/gpu.txt" | tr '\n' ' '
  echo
}

resolve() {  # MINOR OUTPUT OPTIONS...: versions of the requirements on standard input
  local minor=$1 output=$2
  shift 2
  SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt "$WORK/uv/bin/uv" pip compile -q --python-version "$minor" \
    --python-platform x86_64-manylinux_2_28 --no-header --no-annotate "$@" -o "$output" - > /dev/null
}

main() {
  local minor=${FULL%.*} torch_minor target
  for target in "$@"; do
    case $target in
      orchestrator) build orchestrator "$minor" ;;
      worker-cpu)
        [ "${TORCH_CPU_WHEEL:-}" ] || skip "worker-cpu needs TORCH_CPU_WHEEL, a CPU build of torch"
        torch_minor=$(sed -E 's/.*-cp3([0-9]+)-cp.*/3.\1/' <<< "$TORCH_CPU_WHEEL")
        [ "$torch_minor" = "$minor" ] || say "NOTE: TORCH_CPU_WHEEL is for Python $torch_minor, and so is this worker-cpu; the Dockerfile's has $minor"
        mkdir -p "$WORK/index/torch"
        cp "$TORCH_CPU_WHEEL" "$WORK/index/torch/"
        echo "<a href=\"$(basename "$TORCH_CPU_WHEEL" | sed 's/+/%2B/')\">torch</a>" > "$WORK/index/torch/index.html"
        build worker-cpu "$torch_minor" -v "$WORK/index:/index:ro" --build-arg TORCH_CPU_INDEX=file:///index
        ;;
      worker-gpu) check_gpu "$minor" ;;
      *) echo "no image: $target" >&2; exit 2 ;;
    esac
  done
  [[ " $* " == *" orchestrator "* && " $* " == *" worker-cpu "* ]] || return 0
  [ "$REDIS_SERVER" ] || skip "no Redis to serve with: set REDIS_SERVER"
  mounted orchestrator
  mounted worker-cpu
  export WORK REDIS_SERVER
  unshare --net --mount --pid --fork --kill-child --mount-proc "$0" --serve
}

if [ "${1:-}" = --serve ]; then
  trap - EXIT
  serve
else
  [ $# -gt 0 ] || set -- orchestrator worker-cpu worker-gpu
  main "$@"
fi
