"""``python -m benchmarks.scale``, see `predict`."""

from benchmarks.scale.predict import main

if __name__ == "__main__":
    main()
