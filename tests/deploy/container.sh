#!/bin/bash
# What a container runtime does, as far as it matters here: a root of its own that cannot be written, the node's folders in it,
# a user without rights. In namespaces that the caller has made; becomes the command, as pid 1.
#   container.sh ROOT POOL SOCKETS CONFIG USER COMMAND...    POOL, SOCKETS, CONFIG: folders of the "node"
set -euo pipefail
root=$1 pool=$2 sockets=$3 config=$4 user=$5
shift 5
mount --make-rprivate /
mount --bind "$root" "$root"
mkdir -p "$root"/{proc,dev,tmp,pool,run/kvtier,etc/kvtier}
mount -o remount,bind,ro "$root"
mount -t proc proc "$root/proc"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
for node in "null 1 3" "zero 1 5" "random 1 8" "urandom 1 9"; do
    read -r name major minor <<< "$node"
    mknod -m 666 "$root/dev/$name" c "$major" "$minor"
done
mkdir -m 1777 "$root/dev/shm"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
mount --bind "$pool" "$root/pool"
mount --bind "$sockets" "$root/run/kvtier"
mount --bind -o ro "$config" "$root/etc/kvtier"
rights=(--no-new-privs --bounding-set=-all --inh-caps=-all --clear-groups)
[ "$user" = 0 ] && rights=(--clear-groups)
exec chroot "$root" /usr/bin/setpriv --reuid="$user" --regid="$user" "${rights[@]}" "$@"
