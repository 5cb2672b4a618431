"""Each chapter as an evening's work: a folder with holes, and a grader that is the suite itself."""
