from ultr.cli import main

main()
