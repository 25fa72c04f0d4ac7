from dew.cli import main

main()
