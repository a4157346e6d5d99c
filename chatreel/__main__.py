"""`python -m chatreel`: what the demo starts its servers with."""

from chatreel.cli import main

main()
