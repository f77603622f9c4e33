#!/system/bin/sh
# run.sh WORDS...: start Python of this runtime with the arguments WORDS, through the runtime's own loader.
D=${0%/*}
case $D in /*) ;; *) D=$PWD/$D ;; esac
umask 077
read -r TREE <"$D/TREE" || TREE=unknown
unset LD_PRELOAD LD_LIBRARY_PATH PYTHONDONTWRITEBYTECODE
export PYTHONHOME="$D/py" PYTHONPATH="$D/site" PYTHONNOUSERSITE=1 PYTHONSAFEPATH=1 LC_ALL=C.UTF-8
# Compiled modules identify their source by time and size, which two runtimes may share: a cache for each.
export PYTHONPYCACHEPREFIX="$D/../cache/$TREE" XDG_CACHE_HOME="$D/../cache" XDG_CONFIG_HOME="$D/../config"
export PRGE_PYTHON="$D/run.sh" HOME="$D/.." USER="${USER:-shell}" TMPDIR="${TMPDIR:-$D/../tmp}"
export PRGE_NATIVE_LIBRARY="$D/lib/libprge_native.so" OPENBLAS_NUM_THREADS="${OPENBLAS_NUM_THREADS:-1}"
mkdir -p "$TMPDIR"
# This glibc has no table of time zones; the phone's own `date` prints the offset from UTC.
if [ -z "$TZ" ]; then
    Z=$(date +%z)
    case $Z in
    [-+][0-9][0-9][0-9][0-9])
        M=${Z#???} H=${Z%??}
        case $H in +*) H=-${H#?} ;; *) H=+${H#?} ;; esac
        export TZ="<$Z>$H:$M"
        ;;
    esac
fi
exec "$D/lib/ld.so" --library-path "$D/lib" "$D/py/bin/python3" "$@"
