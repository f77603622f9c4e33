#!/system/bin/sh
# job.sh JOB WORDS...: run Python of this runtime with WORDS. The folder JOB gets what tells the process from
# another one with its number (stat, boot), and in the end its exit code (rc).
#
# With PRGE_RESTARTS=N it is started again after a kill or a crash, at most N times in a row that last less than
# a minute; not after an end of its own or a user's error, nor once JOB has a file `stop`. JOB/restarts counts.
umask 077
J=$1
shift
D=${0%/*}
LEFT=${PRGE_RESTARTS:-0}
COUNT=0

note() {
    cat "/proc/$1/stat" >"$J/stat" 2>/dev/null
    echo "$1" >"$J/pid.new" && mv "$J/pid.new" "$J/pid"
}

# Seconds since the phone was started, which no change of its clock moves.
uptime() {
    NOW=0
    { read -r NOW _ </proc/uptime; } 2>/dev/null
    NOW=${NOW%%.*}
}

rm -f "$J/rc" "$J/pid" "$J/restarts"
cat /proc/sys/kernel/random/boot_id >"$J/boot" 2>/dev/null
while :; do
    sh "$D/run.sh" "$@" &
    P=$!
    uptime
    BEGUN=$NOW
    note "$P"
    wait "$P"
    R=$?
    uptime
    [ $((NOW - BEGUN)) -lt 60 ] || LEFT=${PRGE_RESTARTS:-0}
    if [ "$LEFT" -le 0 ] || [ -e "$J/stop" ]; then break; fi
    case $R in 0 | 2 | 130) break ;; esac
    LEFT=$((LEFT - 1)) COUNT=$((COUNT + 1))
    echo "it ended with code $R and is started again"
    echo "$COUNT" >"$J/restarts"
    # Who ends it now must find a process to end.
    sleep 1 &
    note "$!"
    wait "$!"
    if [ -e "$J/stop" ]; then break; fi
done
echo "$R" >"$J/rc.new" && mv "$J/rc.new" "$J/rc"
