# %% ../nbs/770_cli.ipynb #5d1c7a11
if __name__ == "__main__":
    import sys

    from normalnorm.cli import main

    sys.exit(main())
