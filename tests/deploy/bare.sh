#!/bin/bash
# A machine with Debian, its Python and nothing else: no compiler, no network, no sources. What is written is gone with it.
#   bare.sh ROOT WHEELS FOLDER COMMAND...    ROOT, WHEELS: only read; FOLDER: empty, becomes the machine's place
# In namespaces that the caller has made; WHEELS is seen at /wheels.
set -euo pipefail
root=$1 wheels=$2 folder=$3
shift 3
mount --make-rprivate /
mount -t tmpfs -o size=2G tmpfs "$folder"
mkdir "$folder"/{upper,work,machine}
machine=$folder/machine
mount -t overlay overlay -o "lowerdir=$root,upperdir=$folder/upper,workdir=$folder/work" "$machine"
mount -t proc proc "$machine/proc"
mount -t tmpfs -o mode=755 tmpfs "$machine/dev"
for node in "null 1 3" "zero 1 5" "random 1 8" "urandom 1 9"; do
    read -r name major minor <<< "$node"
    mknod -m 666 "$machine/dev/$name" c "$major" "$minor"
done
mkdir -m 1777 "$machine/dev/shm"
mount -t tmpfs -o mode=1777,size=512M tmpfs "$machine/dev/shm"
mkdir "$machine/wheels"
mount --bind -o ro "$wheels" "$machine/wheels"
exec chroot "$machine" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root "$@"
