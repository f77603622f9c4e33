#!/system/bin/sh
# job.sh JOB WORDS...: run Python of this runtime with WORDS. The folder JOB gets what tells the process from
# another one with its number (stat, boot), and in the end its exit code (rc).
umask 077
J=$1
shift
D=${0%/*}
rm -f "$J/rc" "$J/pid"
sh "$D/run.sh" "$@" &
P=$!
cat /proc/sys/kernel/random/boot_id >"$J/boot" 2>/dev/null
cat "/proc/$P/stat" >"$J/stat" 2>/dev/null
echo "$P" >"$J/pid.new" && mv "$J/pid.new" "$J/pid"
wait "$P"
echo "$?" >"$J/rc.new" && mv "$J/rc.new" "$J/rc"
