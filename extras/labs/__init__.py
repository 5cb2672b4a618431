"""Labs: each chapter as an evening's work. Some functions of a step are taken out; a student writes them again.

    python -m extras.labs start 4 FOLDER       a folder with the step, in which the functions of the tasks only raise
    python -m extras.labs check FOLDER         judges it; `python -m extras.labs --help` lists the other commands

Lab N is labs/labN.py, which ends in `LAB = Lab(...)`, and labs/labN.md: its title; each task's name, minutes, what to
read and three hints; the question. The types are in extras/labs/course.py:

    Lab        modules (those that the student gets; the last is the step), tasks, question
    Task       holes ("function", "Class.method", or "module:name"), criteria
    Criterion  what it demands, points, the kind of case, the sizes of its cases ("mesh": how many ranks along what)
    Case       the sizes as attributes, and `draw`: numbers from the student's id. Sizes are the same for every id

A lab derives kinds from Case. `run(step, mesh)` runs on every rank, in processes of their own, with the
student's module as `step`. It yields rows: a name, what the student's functions have made of the case, and what that
should be: FOUND, what the project's file makes of the same case, in processes of its own (a copy for students keeps
it), or a law. Numbers and tensors are judged to a norm-wise bound, other values by ==, `at_most(x)` as a limit. What
the student's process says should be found is never used: if it is another value, its code has changed the judge.
A criterion may judge some rows only (`keys`); `demands` makes several of the same cases, which run once.

A task's criteria call its own holes, holes of earlier tasks, and what is no hole. Each is judged with the student's
file in which the holes of *other* tasks are the project's; if that fails, with the file as it stands. So neither an
error elsewhere nor something that two tasks share costs points. A criterion with `whole` takes the file as it stands.

`Tape` (labs/tape.py) records matmuls, collectives and waits in their order, however they were called: what was sent
(`sent()`), what ran while something was under way (`hidden()`), what nobody has waited for (`left()`). `suite`
(labs/suite.py) is a criterion that runs the whole file in rows of tests/, and holds it against the project's file.
After a failure the project's code with each mistake of tests/faults.py in the task's holes runs the same case, and one
that finds the same numbers is named.
"""
