"""Compare steps on preferences with steps on completions and TRL's: see against_trl.py.

python scripts/bench/preferences.py --json preferences.json [--model FOLDER] [--objectives dpo kto orpo]
"""

from against_trl import main

if __name__ == "__main__":
    main()
