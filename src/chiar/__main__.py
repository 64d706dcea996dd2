"""python -m chiar"""

from chiar.cli import main

main()
