#!/bin/sh
# The nodes of a Slurm cluster that have a GPU in their Gres, as targets for Prometheus' file_sd_configs.
#
#   slurm-targets.sh [-p PORT] [FILE]
#
# PORT is the exporter's (10420). The list goes to FILE, which is replaced in one step, or else to standard output. Where sinfo
# fails or knows no node at all, the status is 1, there is no output and FILE stays as it is.
set -eu
LC_ALL=C
export LC_ALL

usage() {
    echo 'usage: slurm-targets.sh [-p PORT] [FILE]' >&2
    exit 2
}

# A line for each node and partition, so a node may come several times; sorted, so that the same nodes give the same list.
nodes() {
    listed=$(sinfo --noheader --Node --format='%N|%G') || return 1
    [ -n "$listed" ] || return 1
    printf '%s\n' "$listed" | sort -u
}

# Gres is a list such as gpu:a100:4(S:0-1),mps:400. A name that no host has is left out, and told.
targets() {
    awk -F '|' -v port="$port" '
        function has_gpu(gres, entries, parts, count, index_, last) {
            gsub(/\([^)]*\)/, "", gres)
            count = split(gres, entries, ",")
            for (index_ = 1; index_ <= count; index_++) {
                last = split(entries[index_], parts, ":")
                if (parts[1] == "gpu" && !(last > 1 && parts[last] ~ /^0+$/)) return 1
            }
            return 0
        }
        { sub(/[ \t]+$/, "", $1) }
        !has_gpu($2) || seen[$1]++ { next }
        $1 !~ /^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$/ {
            print "slurm-targets.sh: left out, not a name of a host: " $1 | "cat >&2"
            next
        }
        {
            printf "%s\n  {\"targets\": [\"%s:%s\"], \"labels\": {\"instance\": \"%s\"}}", (any++ ? "," : "["), $1, port, $1
        }
        END { print any ? "\n]" : "[]" }
    '
}

port=10420
while getopts p: option; do
    case $option in
        p) port=$OPTARG ;;
        *) usage ;;
    esac
done
shift $((OPTIND - 1))
[ $# -eq 0 ] || [ ! -d "$1" ] || { echo "slurm-targets.sh: $1 is a folder, and a file was expected" >&2; exit 2; }
[ $# -le 1 ] || usage
case $port in
    '' | *[!0-9]* | ??????*) usage ;;
esac
[ "$port" -ge 1 ] && [ "$port" -le 65535 ] || usage

if ! found=$(nodes); then
    echo 'slurm-targets.sh: sinfo gives no nodes' >&2
    exit 1
fi
list=$(printf '%s\n' "$found" | targets)
if [ $# -eq 0 ]; then
    printf '%s\n' "$list"
    exit
fi
umask 022
new=$1.$$.new
trap 'rm -f -- "$new"' EXIT
printf '%s\n' "$list" >"$new"
mv -f -- "$new" "$1"
