#!/bin/bash
# Boots a real systemd as pid 1 of new namespaces, on an overlay over this machine's root: what it writes is gone with it.
# It sees only the units in UNITS, so nothing of this machine's own is started; /dev is a new one, /dev/shm is memory.
#   boot.sh FOLDER UNITS PYTHON VENV REPO   FOLDER: empty, becomes the root's place; PYTHON: prefix of the interpreter
set -euo pipefail
folder=$1 units=$2 python=$3 venv=$4 repo=$5
mount --make-rprivate /
mount -t tmpfs -o size=2G tmpfs "$folder"
mkdir -p "$folder"/{upper,work,root}
root=$folder/root
mount -t overlay overlay -o "lowerdir=/,upperdir=$folder/upper,workdir=$folder/work" "$root"
mount -t proc proc "$root/proc"
mount -t sysfs -o ro sysfs "$root/sys"
mount -t tmpfs -o mode=755 tmpfs "$root/run"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
mkdir "$root/dev/shm" "$root/dev/pts"
mount -t tmpfs -o mode=1777,size=1G tmpfs "$root/dev/shm"
for node in "null 1 3" "zero 1 5" "full 1 7" "random 1 8" "urandom 1 9" "tty 5 0"; do
    read -r name major minor <<< "$node"
    mknod -m 666 "$root/dev/$name" c "$major" "$minor"
done
ln -s /proc/self/fd "$root/dev/fd"
mount -t tmpfs -o mode=755 tmpfs "$root/sys/fs/cgroup"
if [ "$(stat -f -c %T /sys/fs/cgroup)" = cgroup2fs ]; then
    umount "$root/sys/fs/cgroup"
    mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
else
    mkdir "$root"/sys/fs/cgroup/{systemd,unified,devices}
    mount -t cgroup -o none,name=systemd cgroup "$root/sys/fs/cgroup/systemd"
    mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup/unified"
    mount -t cgroup -o devices cgroup "$root/sys/fs/cgroup/devices" || rmdir "$root/sys/fs/cgroup/devices"
fi
mkdir -p "$root/opt/python" "$root/opt/kvtier" "$root/etc/kvtier" "$root/run/units" "$root/run/exchange"
mount --bind "$python" "$root/opt/python"
mount --bind "$venv" "$root/opt/kvtier"
mount --bind "$units" "$root/run/units"
mount --bind "$folder/../exchange" "$root/run/exchange"
if [ ! -d "$root$repo" ]; then # It is below one of the new mounts, /tmp for example.
    mkdir -p "$root$repo"
    mount --bind "$repo" "$root$repo"
fi
exec chroot "$root" env -i container=kvtier-test SYSTEMD_UNIT_PATH=/run/units:/etc/systemd/system PATH=/usr/sbin:/usr/bin:/sbin:/bin \
    /lib/systemd/systemd --system --unit=basic.target --log-target=console --show-status=no
