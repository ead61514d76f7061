"""The door for a checkout: `python cli.py --model llama3-70b --gpus 16` does what `plan` does when installed."""

from planner.command import main

if __name__ == "__main__":
    main()
