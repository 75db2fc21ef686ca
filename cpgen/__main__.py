from cpgen.cli import main

main()
