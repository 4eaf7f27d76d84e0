// Renders a Helm chart as `helm template` does, with Go's text/template and sprig, for where there is no helm:
//
//	go run tests/helm/render.go CHART NAME [VALUES...]
//
// VALUES are files whose keys go over values.yaml. What is not here (subcharts, hooks, lookup, a cluster's capabilities) the chart
// does not use; a function that is not here is an error.
package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"text/template"

	"github.com/Masterminds/sprig"
	"gopkg.in/yaml.v3"
)

type object = map[string]interface{}

func main() {
	if len(os.Args) < 3 {
		fmt.Fprintln(os.Stderr, "usage: go run tests/helm/render.go CHART NAME [VALUES...]")
		os.Exit(2)
	}
	if err := render(os.Args[1], os.Args[2], os.Args[3:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func render(chart, name string, over []string) error {
	described, err := read(filepath.Join(chart, "Chart.yaml"))
	if err != nil {
		return err
	}
	values, err := read(filepath.Join(chart, "values.yaml"))
	if err != nil {
		return err
	}
	for _, file := range over {
		more, err := read(file)
		if err != nil {
			return err
		}
		values = merged(values, more)
	}
	// A key that values.yaml lacks is an error: it is misspelt in the chart.
	all := template.New("chart").Option("missingkey=error")
	functions := sprig.TxtFuncMap()
	functions["include"] = func(name string, data interface{}) (string, error) {
		var text bytes.Buffer
		err := all.ExecuteTemplate(&text, name, data)
		return text.String(), err
	}
	functions["toYaml"] = func(value interface{}) (string, error) {
		var text bytes.Buffer
		encoder := yaml.NewEncoder(&text)
		encoder.SetIndent(2)
		err := encoder.Encode(value)
		return strings.TrimSuffix(text.String(), "\n"), err
	}
	functions["required"] = func(message string, value interface{}) (interface{}, error) {
		if value == nil || value == "" {
			return nil, fmt.Errorf("%s", message)
		}
		return value, nil
	}
	all.Funcs(functions)
	files, err := filepath.Glob(filepath.Join(chart, "templates", "*"))
	if err != nil {
		return err
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		if _, err := all.New(filepath.Base(file)).Parse(string(text)); err != nil {
			return err
		}
	}
	// As Helm does, with capitals.
	data := object{
		"Values":  values,
		"Chart":   object{"Name": described["name"], "Version": described["version"], "AppVersion": described["appVersion"]},
		"Release": object{"Name": name, "Namespace": "vramq", "Service": "Helm"},
	}
	for _, file := range files {
		base := filepath.Base(file)
		var text bytes.Buffer
		if strings.HasPrefix(base, "_") {
			continue
		}
		if err := all.ExecuteTemplate(&text, base, data); err != nil {
			return err
		}
		// The notes are rendered for their errors; they are no manifest.
		if strings.HasSuffix(base, ".yaml") && strings.TrimSpace(text.String()) != "" {
			fmt.Printf("---\n# Source: %s\n%s\n", base, text.String())
		}
	}
	return nil
}

func read(file string) (object, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	found := object{}
	err = yaml.Unmarshal(text, &found)
	return found, err
}

func merged(under, over object) object {
	for key, value := range over {
		inner, isObject := value.(object)
		if old, was := under[key].(object); was && isObject {
			under[key] = merged(old, inner)
		} else {
			under[key] = value
		}
	}
	return under
}
