"""``python -m benchmarks.race``, see `compare`."""

from benchmarks.race.compare import main

if __name__ == "__main__":
    main()
