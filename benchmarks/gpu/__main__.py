"""``python -m benchmarks.gpu``, see `compare`."""

from benchmarks.gpu.compare import main

if __name__ == "__main__":
    main()
