from chiar.cli import main

main()
