#!/system/bin/sh
# job.sh JOB WORDS...: run Python of this runtime with the arguments WORDS. The folder JOB gets the process
# number (pid), what distinguishes the process from a later one with its number (stat, boot), and in the end
# the exit code (rc).
#
# With PRGE_RESTARTS=N, start Python again after a kill or a crash, at most N times in a row that each last less
# than a minute; but not after a regular end or a user's error, nor if JOB has a file `stop`. JOB/restarts counts.
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

# Seconds since the phone was started, which changes of its clock don't affect.
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
    echo "the process ended with code $R and is started again"
    echo "$COUNT" >"$J/restarts"
    # `prge android stop` needs a process to signal during the pause.
    sleep 1 &
    note "$!"
    wait "$!"
    if [ -e "$J/stop" ]; then break; fi
done
echo "$R" >"$J/rc.new" && mv "$J/rc.new" "$J/rc"
